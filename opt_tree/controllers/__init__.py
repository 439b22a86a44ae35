"""Controllers: which policy for the next step."""

from opt_tree.controllers.auto import Auto
from opt_tree.controllers.beta_length import BetaLength
from opt_tree.controllers.calibrated_length import CalibratedLength
from opt_tree.controllers.predicted import LengthPredictor, PredictedLength
from opt_tree.controllers.registry import CONTROLLERS, make_controller, register
from opt_tree.controllers.scheduled import Scheduled
from opt_tree.controllers.selected import SelectedTree, TreeValues

CONTROLLERS.discover(__name__, __path__)

__all__ = [
    "CONTROLLERS",
    "Auto",
    "BetaLength",
    "CalibratedLength",
    "LengthPredictor",
    "PredictedLength",
    "Scheduled",
    "SelectedTree",
    "TreeValues",
    "make_controller",
    "register",
]
