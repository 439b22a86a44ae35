"""Drafters: what may follow."""

from opt_tree.drafters.base import Drafter, DrafterAround
from opt_tree.drafters.causal_lm import CausalLMDrafter
from opt_tree.drafters.eagle import EagleDrafter, EagleHead
from opt_tree.drafters.registry import load_drafter
from opt_tree.drafters.sharpened import Sharpened

__all__ = ["CausalLMDrafter", "Drafter", "DrafterAround", "EagleDrafter", "EagleHead", "Sharpened", "load_drafter"]
