"""The names of `opt_tree`: `opt_tree/__init__.py` hands them on when one is first asked for."""

from opt_tree.controllers import Scheduled
from opt_tree.core.answers import LogProbs
from opt_tree.core.children import TopK
from opt_tree.core.random import Random
from opt_tree.core.sampling import Sampling
from opt_tree.core.step import Outcome, Step
from opt_tree.core.stopping import Stop
from opt_tree.core.target import Output, Target
from opt_tree.core.tree import Tree
from opt_tree.decoding.advising import advise
from opt_tree.decoding.counterfactual import Beside, generate_beside
from opt_tree.decoding.decoder import Decoder
from opt_tree.decoding.generation import Generation
from opt_tree.decoding.pair import Pair, load_pair
from opt_tree.display.explorer import explore
from opt_tree.display.page import to_html
from opt_tree.display.prove import Proof, prove
from opt_tree.display.transcripts import transcript
from opt_tree.display.trees import draw_tree
from opt_tree.drafters import CausalLMDrafter, Drafter, EagleDrafter, EagleHead, load_drafter
from opt_tree.drafters.heads.eagle import load_eagle
from opt_tree.engines.canonical import NotCanonicalError
from opt_tree.integrations.published_api import EaModel, SPModel
from opt_tree.models.canonical import make_canonical
from opt_tree.models.causal_lm import Buckets, CausalLM, UnsupportedModelError
from opt_tree.models.chain_lm import ChainLM, wrap
from opt_tree.models.checkpoints import CheckpointError, load_causal_lm, load_tokenizer
from opt_tree.models.compiling import compile_forwards
from opt_tree.policies import OptTree, Static, TreePolicy
from opt_tree.verifiers import Verdict, Verifier, greedy, match

__all__ = [
    "Beside",
    "Buckets",
    "CausalLM",
    "CausalLMDrafter",
    "ChainLM",
    "CheckpointError",
    "Decoder",
    "Drafter",
    "EaModel",
    "EagleDrafter",
    "EagleHead",
    "Generation",
    "LogProbs",
    "NotCanonicalError",
    "OptTree",
    "Outcome",
    "Output",
    "Pair",
    "Proof",
    "Random",
    "SPModel",
    "Sampling",
    "Scheduled",
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
    "advise",
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
    "make_canonical",
    "match",
    "prove",
    "to_html",
    "transcript",
    "wrap",
]
