"""Complete methods of papers by name: which policy and which verifier make each. All are tested lossless.

Owns the list, which has what is more than a tree policy: that goes by its own name. A drafter goes with each; what it
is, the caller says.
"""

import functools
import math
from collections.abc import Callable
from typing import cast

from opt_tree.decoder import Decoder
from opt_tree.drafter import Drafter
from opt_tree.errors import require
from opt_tree.methods.controllers.beta_length import BetaLength
from opt_tree.methods.controllers.calibrated_length import CalibratedLength
from opt_tree.methods.controllers.predicted import LengthPredictor, PredictedLength
from opt_tree.methods.controllers.registry import ControllerRequest, make_controller
from opt_tree.methods.controllers.selected import SelectedTree
from opt_tree.methods.controllers.selector import Selector
from opt_tree.methods.drafters.combined.rasd import BothTrees, Rasd
from opt_tree.methods.drafters.seen import Seen
from opt_tree.methods.drafters.tables.ngram import NGramDrafter
from opt_tree.methods.policies.acceptance_rates import HALVING
from opt_tree.methods.policies.dynamic_depth import DynamicDepth
from opt_tree.methods.policies.dyspec import DySpec
from opt_tree.methods.policies.eagle2 import Eagle2
from opt_tree.methods.policies.greedy_static import greedy_static_tree
from opt_tree.methods.policies.registry import POLICIES, make_policy
from opt_tree.methods.policies.rheo import Rheo
from opt_tree.methods.policies.sampled import Sampled
from opt_tree.methods.policies.static import EAGLE_1, TOKEN_RECYCLING, Static
from opt_tree.methods.policies.talon import Talon
from opt_tree.methods.policies.threshold_chain import ThresholdChain
from opt_tree.methods.registry import Method, Registry
from opt_tree.methods.verifiers.block_verification import block
from opt_tree.methods.verifiers.k_sequential import k_seq
from opt_tree.methods.verifiers.multi_round_rejection import multi_round
from opt_tree.methods.verifiers.recursive_rejection import without_replacement
from opt_tree.methods.verifiers.rheo_sampling import rheo
from opt_tree.methods.verifiers.traversal_verification import traversal
from opt_tree.models.causal_lm import CausalLM
from opt_tree.models.chain_lm import AnyLM
from opt_tree.models.named import resolve
from opt_tree.policy import OptTree, TreePolicy
from opt_tree.target import Target
from opt_tree.tools.step_costs import costs_of
from opt_tree.verify import Verifier, match

PRESETS = Registry("preset", Method[Callable[..., Decoder]])
"""From a name to the function that makes the decoder of a target and a drafter; one that has a `part` is also given the
folder of what was trained for it."""


@PRESETS.register("plain", "plain decoding in the same loop: the baseline of every speed-up reported here")
def plain(target: Target, drafter: Drafter | None = None) -> Decoder:
    """Plain decoding in the same loop: the empty tree. A drafter is not asked."""
    return Decoder(target, None, Static.empty())


def opt(target: Target, drafter: Drafter, policy: OptTree = OptTree()) -> Decoder:
    """OPT-Tree (arXiv:2406.17276), on an independent drafter or an EAGLE head."""
    return Decoder(target, drafter, policy)


@PRESETS.register("rasd", "the model's tree and the retrieved one, fused and verified whole", "2503.03434")
def rasd(target: Target, drafter: Drafter) -> Decoder:
    """RASD (arXiv:2503.03434): the model's tree and a pruned tree of retrieved branches, both verified whole.

    A drafter `rasd:MODEL+store:PATH` retrieves from its store, as REST does; any other one is merged with what followed
    the same one to three tokens in the text at hand, as in prompt lookup. The paper has both retrievals.
    """
    known = drafter if isinstance(drafter, Rasd) else Rasd(drafter, NGramDrafter((0.0, 0.0, 0.0)))
    fused = Rasd(known.drafter, known.retrieval, known.top, Eagle2().max_depth)
    return Decoder(target, fused, BothTrees(fused))


@PRESETS.register("adaeagle", "an EAGLE head's chain, its length predicted", "2412.18910", part="length")
def adaeagle(target: Target, drafter: Drafter, folder: str, threshold: float | None = None) -> Decoder:
    """AdaEAGLE (arXiv:2412.18910): an EAGLE head's chain, as long as its predictor says or, with a threshold, longer.

    The latter is AdaEAGLE-DDD: it drafts on while the probability of the path is at least the threshold.
    """
    require(CausalLM, target=target)
    lm = cast(CausalLM, target)
    predictor = LengthPredictor.load(folder, lm)
    chain = Static.chain if threshold is None else functools.partial(ThresholdChain, predictor.longest, threshold)
    return Decoder(target, drafter, PredictedLength(predictor, lm, chain))


@PRESETS.register("eesd", "an early exit's chain, its length by the calibrated posterior", "2406.03853")
def eesd(target: Target, drafter: Drafter, control: Callable[[], TreePolicy] = CalibratedLength) -> Decoder:
    """EESD (arXiv:2406.03853): an early exit, drafter `exit:PATH`, whose chain is as long as Thompson sampling says."""
    return Decoder(target, drafter, control())


@PRESETS.register(
    "delayed_selected", "delayed trees, the sizes of each step's chosen by a network", "2602.16994", part="trees"
)
def delayed_selected(target: Target, drafter: Drafter, folder: str) -> Decoder:
    """Delayed trees with the neural selector (arXiv:2602.16994), judged by the verifier that it was trained for."""
    require(CausalLM, target=target)
    seen = Seen(drafter)
    selector = Selector.load(folder, cast(CausalLM, target), seen.models[0])
    return Decoder(target, seen, SelectedTree(selector, seen), selector.choice.judge)


def make_preset(spec: str, target: Target, drafter: Drafter) -> Decoder:
    """Make the decoder of a preset: `rasd`, or `adaeagle:PATH` for one with a trained part; "demo" is the embedded one.

    A tree policy whose name is not in the list is one too, with 60 nodes at most and judged by `match`: `eagle2`,
    `sequoia:8`. Raises ValueError for an unknown name and a path that is missing or not wanted, CheckpointError for a
    PATH that holds nothing for this pair.

        make_preset("adaeagle:demo", pair.target, pair.drafter).generate(pair.encode("Why is the sky blue?"))
    """
    name, path = PRESETS.split(spec)
    if name not in PRESETS and POLICIES.split(spec)[0] in POLICIES:
        return Decoder(target, drafter, make_policy(spec, OptTree.nodes))
    method = PRESETS.named(name)
    if (method.part is not None) != bool(path):
        what = "no path and no parameters" if method.part is None else f"a folder: {name}:PATH"
        raise ValueError(f"preset {name} reads {what}, got {spec!r}")
    return method.make(target, drafter, *([resolve(path, method.part)] if method.part else []))


PRESETS.register(
    "adaeagle_ddd",
    "an EAGLE head's chain of predicted length, drafted on while it is sure",
    "2412.18910",
    part="length",
)(lambda target, drafter, folder: adaeagle(target, drafter, folder, math.exp(-0.6)))
PRESETS.register("eesd_beta", "an early exit's chain, its length by the Beta posterior", "2406.03853")(
    lambda target, drafter: eesd(target, drafter, BetaLength)
)


def _preset(name: str, paper: str, about: str, policy: TreePolicy, verifier: Verifier = match) -> None:
    """List a method whose policy and verifier are fixed."""
    PRESETS.register(name, about, paper)(lambda target, drafter: Decoder(target, drafter, policy, verifier))


_preset("dynamic_depth", "2409.00142", "EAGLE-2 of dynamic depth (DDD)", DynamicDepth())
_preset("talon", "2601.07353", "Talon, on an EAGLE head or any other drafter", Talon())
_preset("medusa", "2401.10774", "the fixed tree that Medusa derives from rates", greedy_static_tree(HALVING, 63, 4))
_preset("eagle1", "2401.15077", "a fixed tree of EAGLE-1's size, by Medusa's rule", greedy_static_tree(HALVING, 25, 5))
_preset(
    "token_recycling",
    "2408.08696",
    "Token Recycling's fixed tree of 80 nodes, on the drafter `TokenRecycling`",
    Static.of_widths(TOKEN_RECYCLING),
)

_preset(
    "parallelspec_eagle",
    "2410.05589",
    "ParallelSpec in EAGLE: EAGLE-1's released tree, on the drafter `parallelspec:PATH`",
    Static.of_widths(EAGLE_1),
)
_preset(
    "parallelspec_medusa",
    "2410.05589",
    "ParallelSpec in Medusa: Medusa's tree, on the drafter `parallelspec:PATH`",
    greedy_static_tree(HALVING, 63, 4),
)

# Trees whose children are drawn: for a temperature above 0.
_preset("specinfer", "2305.09781", "independent chains, multi-round rejection", Sampled.chains(3, 5), multi_round)
_preset("spectr", "2310.15141", "independent chains, k-sequential selection", Sampled.chains(3, 5), k_seq)
_preset(
    "delayed", "2602.16994", "delayed expansion: a trunk, then independent branches", Sampled.delayed(), multi_round
)
_preset("block_verification", "2403.10444", "one sampled chain, judged as a whole", Sampled.chain(6), block)
_preset(
    "traversal_verification",
    "2505.12398",
    "sampled paths, judged from their leaves",
    Sampled.chains(3, 5),
    traversal,
)
_preset(
    "dyspec",
    "2410.11744",
    "children without replacement where they are likely to be reached",
    DySpec(),
    without_replacement,
)
_preset("rheo", "2609.21827", "the best tokens and one draw in every sibling group", Rheo(), rheo)


def controller(spec: str, target: AnyLM, drafter: Drafter, tree: OptTree, seed: int = 0) -> TreePolicy:
    """Make the controller of a name for a pair: `auto`, `beta`, `predicted:PATH`; see `CONTROLLERS`.

    Args: `tree`, the largest it may choose; `seed`, of what it draws. One that weighs costs measures them, once.
    Raises ValueError for an unknown name, CheckpointError for a PATH that holds nothing for this target.

        policy = controller("beta", pair.target, pair.drafter, OptTree(24, 0.3))
        Decoder(pair.target, pair.drafter, policy).generate(pair.encode("Why is the sky blue?"))
    """
    return make_controller(spec, ControllerRequest(target, tree, functools.partial(costs_of, target, drafter), seed))
