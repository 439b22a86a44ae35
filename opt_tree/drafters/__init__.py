"""Drafters: what may follow."""

from opt_tree.drafters.base import Drafter, DrafterAround
from opt_tree.drafters.causal_lm import CausalLMDrafter
from opt_tree.drafters.chain_lm import ChainLMDrafter, model_drafter
from opt_tree.drafters.copying import Copying
from opt_tree.drafters.dflash import DFlashDrafter
from opt_tree.drafters.eagle import EagleDrafter
from opt_tree.drafters.eagle_head import EagleHead
from opt_tree.drafters.early_exit import EarlyExit, ExitLayer
from opt_tree.drafters.grafted import Grafted
from opt_tree.drafters.ngram import NGramDrafter
from opt_tree.drafters.ngram_recycling import NGramRecycling
from opt_tree.drafters.one_pass import MedusaDrafter, MedusaHeads, OnePass
from opt_tree.drafters.product import Product
from opt_tree.drafters.rasd import Rasd
from opt_tree.drafters.recycling import TokenRecycling
from opt_tree.drafters.registry import load_drafter
from opt_tree.drafters.residual import ResidualDrafter, ResidualHeads
from opt_tree.drafters.sharpened import Sharpened
from opt_tree.drafters.store import Store, StoreDrafter
from opt_tree.drafters.trimmed import TrimmedDrafter

__all__ = [
    "CausalLMDrafter",
    "ChainLMDrafter",
    "Copying",
    "DFlashDrafter",
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
    "NGramRecycling",
    "OnePass",
    "Product",
    "Rasd",
    "ResidualDrafter",
    "ResidualHeads",
    "Sharpened",
    "Store",
    "StoreDrafter",
    "TokenRecycling",
    "TrimmedDrafter",
    "load_drafter",
    "model_drafter",
]
