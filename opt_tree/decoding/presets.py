"""One function a method: which drafter, policy and verifier make it. All listed in PRESETS are tested lossless."""

import functools
from collections.abc import Callable
from typing import TypeVar

from opt_tree.controllers import Controller, make_controller
from opt_tree.controllers.registry import Wanted
from opt_tree.core.registry import Method, Registry
from opt_tree.core.target import Target
from opt_tree.decoding.decoder import Decoder
from opt_tree.decoding.step_costs import costs_of
from opt_tree.drafters import Drafter
from opt_tree.models.chain_lm import AnyLM
from opt_tree.policies import (
    HALVING,
    AcceptanceRates,
    Delayed,
    DynamicDepth,
    DySpec,
    Eagle2,
    OptTree,
    Rheo,
    Sampled,
    SequoiaTree,
    Static,
    Talon,
    greedy_static_tree,
)
from opt_tree.policies.static import TOKEN_RECYCLING
from opt_tree.verifiers import block, k_seq, multi_round, traversal, without_replacement
from opt_tree.verifiers import rheo as rheo_verifier

PRESETS = Registry("preset", Method[Callable[..., Decoder]])
"""The complete methods of this file, by the names of their functions."""
Made = TypeVar("Made", bound=Callable[..., Decoder])


def _preset(paper: str = "") -> Callable[[Made], Made]:
    """List a method under its own name; what it is, its docstring says."""
    return lambda made: PRESETS.register(made.__name__, (made.__doc__ or "").rstrip("."), paper)(made)


@_preset("2406.17276")
def opt(target: Target, drafter: Drafter, policy: OptTree = OptTree()) -> Decoder:
    """OPT-Tree (arXiv:2406.17276), on an independent drafter or an EAGLE head."""
    return Decoder(target, drafter, policy)


@_preset("2211.17192")
def chain(target: Target, drafter: Drafter, length: int = 4) -> Decoder:
    """Classic speculative decoding: one path of the drafter's best tokens (arXiv:2211.17192, drafted greedily)."""
    return Decoder(target, drafter, Static.chain(length))


@_preset()
def kary(target: Target, drafter: Drafter, arity: int = 2, depth: int = 4) -> Decoder:
    """A full k-ary tree; arity 2 is the binary tree of the OPT-Tree paper's tables."""
    return Decoder(target, drafter, Static.kary(arity, depth))


@_preset()
def plain(target: Target, drafter: Drafter | None = None) -> Decoder:
    """Plain decoding in the same loop: the empty tree. The baseline of every speed-up reported here."""
    return Decoder(target, None, Static.empty())


@_preset("2406.16858")
def eagle2(target: Target, drafter: Drafter, policy: Eagle2 = Eagle2()) -> Decoder:
    """EAGLE-2 (arXiv:2406.16858), on an EAGLE head or any other drafter."""
    return Decoder(target, drafter, policy)


@_preset("2409.00142")
def dynamic_depth(target: Target, drafter: Drafter, policy: DynamicDepth = DynamicDepth()) -> Decoder:
    """EAGLE-2 of dynamic depth (DDD, arXiv:2409.00142)."""
    return Decoder(target, drafter, policy)


@_preset("2601.07353")
def talon(target: Target, drafter: Drafter, policy: Talon = Talon()) -> Decoder:
    """Talon (arXiv:2601.07353), on an EAGLE head or any other drafter."""
    return Decoder(target, drafter, policy)


@_preset("2402.12374")
def sequoia(
    target: Target, drafter: Drafter, rates: AcceptanceRates = HALVING, nodes: int = 60, depth: int = 8
) -> Decoder:
    """Sequoia's tree (arXiv:2402.12374) over the drafter's best tokens, for temperature 0 and sample-and-match."""
    return Decoder(target, drafter, SequoiaTree(rates, nodes, depth))


@_preset("2401.10774")
def medusa(
    target: Target, drafter: Drafter, rates: AcceptanceRates = HALVING, nodes: int = 63, depth: int | None = 4
) -> Decoder:
    """The fixed tree that Medusa (arXiv:2401.10774) derives from acceptance rates, on any drafter."""
    return Decoder(target, drafter, greedy_static_tree(rates, nodes, depth))


@_preset("2401.15077")
def eagle1(
    target: Target, drafter: Drafter, rates: AcceptanceRates = HALVING, nodes: int = 25, depth: int | None = 5
) -> Decoder:
    """A fixed tree of EAGLE-1's size (arXiv:2401.15077), by Medusa's rule; OPT-Tree's tables have the released one."""
    return Decoder(target, drafter, greedy_static_tree(rates, nodes, depth))


@_preset("2408.08696")
def token_recycling(target: Target, drafter: Drafter) -> Decoder:
    """Token Recycling (arXiv:2408.08696) with its fixed tree of 80 nodes, on the drafter `TokenRecycling`."""
    return Decoder(target, drafter, Static.of_widths(TOKEN_RECYCLING))


@_preset("2305.09781")
def specinfer(target: Target, drafter: Drafter, chains: int = 3, length: int = 5) -> Decoder:
    """SpecInfer (arXiv:2305.09781): independent chains, multi-round rejection, for temperature > 0 (as all below)."""
    return Decoder(target, drafter, Sampled.chains(chains, length), multi_round)


@_preset("2310.15141")
def spectr(target: Target, drafter: Drafter, chains: int = 3, length: int = 5) -> Decoder:
    """SpecTr (arXiv:2310.15141): independent chains, k-sequential selection."""
    return Decoder(target, drafter, Sampled.chains(chains, length), k_seq)


@_preset("2602.16994")
def delayed(target: Target, drafter: Drafter, policy: Delayed = Delayed()) -> Decoder:
    """Delayed expansion (arXiv:2602.16994): a trunk, then independent branches."""
    return Decoder(target, drafter, policy, multi_round)


@_preset("2403.10444")
def block_verification(target: Target, drafter: Drafter, length: int = 6) -> Decoder:
    """Block verification (arXiv:2403.10444): one sampled chain, judged as a whole."""
    return Decoder(target, drafter, Sampled.chain(length), block)


@_preset("2505.12398")
def traversal_verification(target: Target, drafter: Drafter, chains: int = 3, length: int = 5) -> Decoder:
    """Traversal verification (arXiv:2505.12398): sampled paths, judged from their leaves."""
    return Decoder(target, drafter, Sampled.chains(chains, length), traversal)


@_preset("2410.11744")
def dyspec(target: Target, drafter: Drafter, policy: DySpec = DySpec()) -> Decoder:
    """DySpec (arXiv:2410.11744): children without replacement where they are likely to be reached."""
    return Decoder(target, drafter, policy, without_replacement)


@_preset("2609.21827")
def rheo(target: Target, drafter: Drafter, policy: Rheo = Rheo()) -> Decoder:
    """RheoSampling's trees (arXiv:2609.21827): the best tokens and one draw in every sibling group."""
    return Decoder(target, drafter, policy, rheo_verifier)


def controller(spec: str, target: AnyLM, drafter: Drafter, tree: OptTree, seed: int = 0) -> Controller:
    """Make the controller of a name for a pair: `auto`, `beta`, `predicted:PATH`; see `CONTROLLERS`.

    Args: `tree`, the largest it may choose; `seed`, of what it draws. One that weighs costs measures them, once.
    Raises ValueError for an unknown name, CheckpointError for a PATH that holds nothing for this target.

        policy = controller("beta", pair.target, pair.drafter, OptTree(24, 0.3))
        Decoder(pair.target, pair.drafter, policy).generate(pair.encode("Why is the sky blue?"))
    """
    costs = functools.cache(functools.partial(costs_of, target, drafter))  # to look at all weights takes a while
    return make_controller(spec, Wanted(target, tree, costs, seed))
