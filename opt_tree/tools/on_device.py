"""Steps that stay on the device: which drafters and policies there are tensors for."""

from collections.abc import Callable
from typing import Any

from opt_tree.backends.device_decoder import DeviceDecoder
from opt_tree.backends.tensor_drafter import ByLayers, TensorDrafter
from opt_tree.backends.tensor_growth import Beam, Best, Fixed, Growth
from opt_tree.children import TopK
from opt_tree.decoder import Decoder
from opt_tree.draft_model import CausalLMDrafter
from opt_tree.drafter import Drafter
from opt_tree.errors import require
from opt_tree.methods.drafters.combined.copying import Copying
from opt_tree.methods.drafters.combined.grafted import Grafted
from opt_tree.methods.drafters.combined.recent import Recent
from opt_tree.methods.drafters.heads.blocks import BlockDrafter
from opt_tree.methods.drafters.heads.eagle import EagleDrafter
from opt_tree.methods.drafters.heads.eagle3 import Eagle3Drafter
from opt_tree.methods.drafters.heads.one_pass import MedusaDrafter
from opt_tree.methods.drafters.heads.parallel_spec import ParallelSpecDrafter, PEagleDrafter
from opt_tree.methods.drafters.small_models.trimmed import TrimmedDrafter
from opt_tree.methods.drafters.tables.ngram import NGramDrafter
from opt_tree.methods.drafters.tables.store import StoreDrafter
from opt_tree.methods.policies.dynamic_depth import DynamicDepth
from opt_tree.methods.policies.eagle2 import Eagle2
from opt_tree.methods.policies.static import Static
from opt_tree.policy import OptTree, TreePolicy
from opt_tree.tools.joined_tensors import CopyingTensors, GraftedTensors, RecentTensors
from opt_tree.tools.one_pass_tensors import Masked, OfBlock, OfDepths
from opt_tree.tools.table_tensors import Tabled

TENSORS: dict[type[Drafter], Callable[[Any], TensorDrafter]] = {
    **dict.fromkeys((CausalLMDrafter, TrimmedDrafter, EagleDrafter, Eagle3Drafter), ByLayers),
    **dict.fromkeys((ParallelSpecDrafter, PEagleDrafter), Masked),
    **{MedusaDrafter: OfDepths, BlockDrafter: OfBlock, NGramDrafter: Tabled, StoreDrafter: Tabled},
}
"""How drafters of these classes answer on tensors."""


def on_device(decoder: Decoder) -> DeviceDecoder:
    """Return a decoder of the same parts whose steps stay on the device: the host waits once a step.

    Draft models, EAGLE heads and heads of one pass; stores and the text at hand, alone, below a model's first layer
    (`graft:1:`) and mixed into a model (`copy`). The trees of `OptTree`; without a table also those of `Eagle2`,
    `DynamicDepth` and of `Static` with its most probable children. `greedy` and `match`. Other steps are the host's:
    `repr` says why none is on the device, `taken` how many of the last text were. Texts, trees and acceptance lengths
    are those of the decoder. Where a draft stops, one layer more is launched, as the host looks at its flag meanwhile.
    On CUDA a step is captured, as a whole or layer by layer, where the forwards of its models are (`compile_forwards`).

        decoder = on_device(Decoder(pair.target, pair.drafter, OptTree(nodes=16)))
        decoder.generate(pair.encode("Why is the sky blue?")).tokens, decoder.taken
    """
    require(Decoder, decoder=decoder)
    tensors, policy = tensors_of(decoder.drafter), decoder.policy
    growth, why = None, None
    if tensors is None:
        why = f"{_name(decoder.drafter)} drafts on the host"
    elif tensors.names_few and type(policy) is not OptTree:
        why = f"{_name(policy)} picks any of a table's ties"
    elif (growth := growth_of(policy, tensors.columns)) is None:
        why = f"{_name(policy)} looks at its trees on the host"
    return DeviceDecoder(decoder, tensors_of, growth, why)


def tensors_of(drafter: Drafter | None) -> TensorDrafter | None:
    """How a drafter answers on tensors, None where nobody wrote it. A subclass may answer otherwise."""
    if type(drafter) is Copying or type(drafter) is Grafted:
        # A table sees more of the text than the model of `Recent` beside it has keys.
        model = None if type(drafter.drafter) is Recent else tensors_of(drafter.drafter)
        if model is None:
            return None
        if isinstance(drafter, Copying):
            return CopyingTensors(drafter, model)
        carried = drafter.depth == 1 and type(drafter.table) in (NGramDrafter, StoreDrafter)
        return GraftedTensors(drafter, model) if carried else None
    if type(drafter) is Recent:
        return RecentTensors(drafter) if type(drafter.drafter) in (CausalLMDrafter, TrimmedDrafter) else None
    make = None if drafter is None else TENSORS.get(type(drafter))
    return None if make is None else make(drafter)


def growth_of(policy: TreePolicy, columns: int) -> Growth | None:
    """How a policy's trees grow on tensors, None where nobody wrote it. `columns`: of the drafter's answers."""
    if type(policy) is OptTree:
        return Best(int(policy.nodes), policy.threshold)
    if type(policy) is Eagle2:
        return Beam(policy.top_k, policy.nodes)
    if type(policy) is DynamicDepth:
        return Beam(policy.top_k, policy.nodes, policy.threshold, policy.checks)
    if type(policy) is Static and type(policy.children) is TopK and policy.paths:
        return Fixed(policy.paths, columns)
    return None


def _name(part: TreePolicy | Drafter | None) -> str:
    return "nobody" if part is None else type(part).__name__
