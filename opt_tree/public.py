"""The names of `opt_tree`: `opt_tree/__init__.py` hands them on when one is first asked for."""

from opt_tree.backends.batch.side_by_side import generate_batch, side_by_side
from opt_tree.backends.canonical import NotCanonicalError
from opt_tree.children import LogProbs, TopK
from opt_tree.decoder import Decoder
from opt_tree.draft_model import CausalLMDrafter
from opt_tree.drafter import Drafter
from opt_tree.generation import Generation, Outcome, Step
from opt_tree.integrations.hf_generate import custom_generate
from opt_tree.integrations.published_api import EaModel, SPModel
from opt_tree.methods.controllers.scheduled import Scheduled
from opt_tree.methods.drafters.heads.eagle import EagleDrafter, load_eagle
from opt_tree.methods.drafters.heads.eagle_head import EagleHead
from opt_tree.methods.drafters.registry import load_drafter
from opt_tree.methods.policies.static import Static
from opt_tree.methods.recorder import Recorder
from opt_tree.methods.sampling import Sampling
from opt_tree.models.canonical import make_canonical
from opt_tree.models.causal_lm import Buckets, CausalLM, UnsupportedModelError
from opt_tree.models.chain_lm import ChainLM, wrap
from opt_tree.models.checkpoints import CheckpointError, load_causal_lm, load_tokenizer
from opt_tree.models.compiling import compile_forwards
from opt_tree.policy import OptTree, TreePolicy
from opt_tree.sampling import Random
from opt_tree.target import Output, Target
from opt_tree.tools.advising import advise
from opt_tree.tools.beside import Beside, generate_beside
from opt_tree.tools.display.explorer import explore
from opt_tree.tools.display.page import to_html
from opt_tree.tools.display.prove import Proof, prove
from opt_tree.tools.display.transcripts import transcript
from opt_tree.tools.display.trees import draw_tree
from opt_tree.tools.on_device import on_device
from opt_tree.tools.pair import Pair, load_pair
from opt_tree.tools.stop_strings import Stop
from opt_tree.tree import Tree
from opt_tree.verify import Verdict, Verifier, greedy, match

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
    "Recorder",
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
    "custom_generate",
    "draw_tree",
    "explore",
    "generate_batch",
    "generate_beside",
    "greedy",
    "load_causal_lm",
    "load_drafter",
    "load_eagle",
    "load_pair",
    "load_tokenizer",
    "make_canonical",
    "match",
    "on_device",
    "prove",
    "side_by_side",
    "to_html",
    "transcript",
    "wrap",
]
