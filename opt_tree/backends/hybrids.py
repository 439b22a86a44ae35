"""Networks some of whose layers are gated delta nets: their state follows the tree (`DeltaCache`)."""

from typing import Any, cast

from transformers import DynamicCache
from transformers.cache_utils import Cache

from opt_tree.backend import Inputs, layer_shapes
from opt_tree.backends.delta_layers import delta_forwards, delta_nets
from opt_tree.backends.delta_net import DeltaCache
from opt_tree.backends.packed import Buckets, Packed
from opt_tree.errors import UnsupportedModelError
from opt_tree.target import Output


class Delta(Packed):
    """Computes forwards in which each row's running state is that of its own path."""

    def __init__(self, network: Any, buckets: Buckets | None = None) -> None:
        if buckets is not None:
            raise UnsupportedModelError(
                f"{network.config.name_or_path or type(network).__name__} pads its forwards to buckets, and has gated "
                "delta nets, which score a tree as it is"
            )
        super().__init__(network)
        self._delta = delta_nets(network)

    def new_cache(self) -> DeltaCache:
        shapes = layer_shapes(self.network, DynamicCache(config=self.network.config.get_text_config()))
        return DeltaCache(shapes, {layer: int(cast(Any, net).conv_kernel_size) for layer, net in self._delta.items()})

    def forward(self, inputs: Inputs, cache: Cache) -> Output:
        with delta_forwards(self._delta):
            return super().forward(inputs, cache)
