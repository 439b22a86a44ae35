"""opt_tree: draft-tree speculative decoding on unmodified transformers models.

Which tokens may follow (`Drafter`), which of them to draft (`TreePolicy`) and how the target judges them (`Verifier`)
are three independent questions; `Decoder` puts one answer to each into one loop.
"""

import opt_tree.interrupted  # noqa: F401

# isort: split
from opt_tree.beside import Beside, generate_beside
from opt_tree.chain_lm import ChainLM, wrap
from opt_tree.checkpoints import CheckpointError, load_causal_lm, load_tokenizer
from opt_tree.children import Few, TopK
from opt_tree.compat import EaModel, SPModel
from opt_tree.compiling import compile_forwards
from opt_tree.controllers import Controller, Fixed, Scheduled
from opt_tree.decode import Decoder, Generation
from opt_tree.display import draw_tree, explore, to_html, transcript
from opt_tree.drafters import CausalLMDrafter, Drafter, EagleDrafter, EagleHead, Sharpened, load_drafter
from opt_tree.drafters.eagle import load_eagle
from opt_tree.lm import Buckets, CausalLM, UnsupportedModelError
from opt_tree.pairs import Pair, load_pair
from opt_tree.policies import OptTree, Static, TreePolicy
from opt_tree.random import Random
from opt_tree.sampling import Sampling
from opt_tree.step import Outcome, Step
from opt_tree.stopping import Stop
from opt_tree.target import Output, Target
from opt_tree.tree import Tree
from opt_tree.verifiers import Verdict, Verifier, greedy, match

__version__ = "0.1.0"

__all__ = [
    "Beside",
    "Buckets",
    "CausalLM",
    "CausalLMDrafter",
    "ChainLM",
    "CheckpointError",
    "Controller",
    "Decoder",
    "Drafter",
    "EaModel",
    "EagleDrafter",
    "EagleHead",
    "Few",
    "Fixed",
    "Generation",
    "OptTree",
    "Outcome",
    "Output",
    "Pair",
    "Random",
    "SPModel",
    "Sampling",
    "Scheduled",
    "Sharpened",
    "Static",
    "Step",
    "Stop",
    "Target",
    "TopK",
    "Tree",
    "TreePolicy",
    "UnsupportedModelError",
    "Verdict",
    "Verifier",
    "compile_forwards",
    "draw_tree",
    "explore",
    "generate_beside",
    "greedy",
    "load_causal_lm",
    "load_drafter",
    "load_eagle",
    "load_pair",
    "load_tokenizer",
    "match",
    "to_html",
    "transcript",
    "wrap",
]
