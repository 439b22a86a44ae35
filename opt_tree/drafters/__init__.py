"""Drafters: what may follow."""

from opt_tree.drafters.base import Drafter, DrafterAround
from opt_tree.drafters.combined.copying import Copying
from opt_tree.drafters.combined.grafted import Grafted
from opt_tree.drafters.combined.rasd import Rasd
from opt_tree.drafters.heads.dflash import DFlashDrafter
from opt_tree.drafters.heads.dspark import DSparkDrafter
from opt_tree.drafters.heads.eagle import EagleDrafter
from opt_tree.drafters.heads.eagle_head import EagleHead
from opt_tree.drafters.heads.early_exit import EarlyExit, ExitLayer
from opt_tree.drafters.heads.one_pass import MedusaDrafter, MedusaHeads, OnePass
from opt_tree.drafters.heads.parallel_spec import ParallelHead, ParallelSpecDrafter
from opt_tree.drafters.registry import KINDS, load_drafter, register
from opt_tree.drafters.small_models.causal_lm import CausalLMDrafter
from opt_tree.drafters.small_models.chain_lm import ChainLMDrafter, model_drafter
from opt_tree.drafters.small_models.trimmed import TrimmedDrafter
from opt_tree.drafters.tables.ngram import NGramDrafter
from opt_tree.drafters.tables.recycling import TokenRecycling
from opt_tree.drafters.tables.store import Store, StoreDrafter

KINDS.discover(__name__, __path__)

__all__ = [
    "KINDS",
    "CausalLMDrafter",
    "ChainLMDrafter",
    "Copying",
    "DFlashDrafter",
    "DSparkDrafter",
    "Drafter",
    "DrafterAround",
    "EagleDrafter",
    "EagleHead",
    "EarlyExit",
    "ExitLayer",
    "Grafted",
    "MedusaDrafter",
    "MedusaHeads",
    "NGramDrafter",
    "OnePass",
    "ParallelHead",
    "ParallelSpecDrafter",
    "Rasd",
    "Store",
    "StoreDrafter",
    "TokenRecycling",
    "TrimmedDrafter",
    "load_drafter",
    "model_drafter",
    "register",
]
