"""Steps that stay on the device: which drafters and policies there are tensors for."""

from opt_tree.backends.device_decoder import DeviceDecoder
from opt_tree.backends.tensor_growth import Beam, Best, Fixed, Growth
from opt_tree.children import TopK
from opt_tree.decoder import Decoder
from opt_tree.draft_model import CausalLMDrafter, OfModel
from opt_tree.drafter import Drafter
from opt_tree.errors import require
from opt_tree.methods.drafters.heads.eagle import EagleDrafter
from opt_tree.methods.drafters.heads.eagle3 import Eagle3Drafter
from opt_tree.methods.drafters.small_models.trimmed import TrimmedDrafter
from opt_tree.methods.policies.dynamic_depth import DynamicDepth
from opt_tree.methods.policies.eagle2 import Eagle2
from opt_tree.methods.policies.static import Static
from opt_tree.opt import OptTree
from opt_tree.policy import TreePolicy

DRAFTERS = (CausalLMDrafter, TrimmedDrafter, EagleDrafter, Eagle3Drafter)


def on_device(decoder: Decoder) -> DeviceDecoder:
    """Return a decoder of the same parts whose steps stay on the device: the host waits once a step.

    Draft models and EAGLE heads; the trees of `OptTree`, `Eagle2`, `DynamicDepth` and of `Static` with its most
    probable children; `greedy` and `match`. Other steps are the host's: `repr` says why none is on the device, `taken`
    how many of the last text were. Texts, trees and acceptance lengths are those of the decoder. On CUDA a step is
    captured as a whole where the forwards of both models are (`compile_forwards`).

        decoder = on_device(Decoder(pair.target, pair.drafter, OptTree(nodes=16)))
        decoder.generate(pair.encode("Why is the sky blue?")).tokens, decoder.taken
    """
    require(Decoder, decoder=decoder)
    drafter, policy = decoder.drafter, decoder.policy
    if type(drafter) not in DRAFTERS or not isinstance(drafter, OfModel):
        return DeviceDecoder(decoder, None, f"{_name(drafter)} drafts on the host")
    growth = growth_of(policy, drafter)
    return DeviceDecoder(decoder, growth, None if growth else f"{_name(policy)} looks at its trees on the host")


def growth_of(policy: TreePolicy, drafter: OfModel) -> Growth | None:
    """How a policy's trees grow on tensors, None where nobody wrote it."""
    if type(policy) is OptTree:
        return Best(int(policy.nodes), policy.threshold)
    if type(policy) is Eagle2:
        return Beam(policy.top_k, policy.nodes)
    if type(policy) is DynamicDepth:
        return Beam(policy.top_k, policy.nodes, policy.threshold, policy.checks)
    if type(policy) is Static and type(policy.children) is TopK and policy.paths:
        return Fixed(policy.paths, drafter.drafted.columns)
    return None


def _name(part: TreePolicy | Drafter | None) -> str:
    return "nobody" if part is None else type(part).__name__
