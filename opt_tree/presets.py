"""One function a method: which drafter, policy and verifier make it. All listed in PRESETS are tested lossless."""

from collections.abc import Callable

from opt_tree.decode import Decoder
from opt_tree.drafters import Drafter
from opt_tree.lm import CausalLM
from opt_tree.policies import OptTree, Static


def opt(target: CausalLM, drafter: Drafter, policy: OptTree = OptTree()) -> Decoder:
    """OPT-Tree (arXiv:2406.17276), on an independent drafter or an EAGLE head."""
    return Decoder(target, drafter, policy)


def chain(target: CausalLM, drafter: Drafter, length: int = 4) -> Decoder:
    """Classic speculative decoding: one path of the drafter's best tokens (arXiv:2211.17192, drafted greedily)."""
    return Decoder(target, drafter, Static.chain(length))


def kary(target: CausalLM, drafter: Drafter, arity: int = 2, depth: int = 4) -> Decoder:
    """A full k-ary tree; arity 2 is the binary tree of the OPT-Tree paper's tables."""
    return Decoder(target, drafter, Static.kary(arity, depth))


def plain(target: CausalLM, drafter: Drafter | None = None) -> Decoder:
    """Plain decoding in the same loop: the empty tree. The baseline of every speed-up reported here."""
    return Decoder(target, None, Static.empty())


PRESETS: dict[str, Callable[..., Decoder]] = {"opt": opt, "chain": chain, "kary": kary, "plain": plain}
