"""The model that lm-eval is given: `hf` with a drafter. Imported when lm-eval makes one."""

from typing import Any

import torch
from lm_eval.models.huggingface import HFLM

from opt_tree.decoder import Decoder
from opt_tree.integrations.hf_generate import custom_generate
from opt_tree.methods.policies.static import Static
from opt_tree.opt import OptTree
from opt_tree.tools.pair import load_pair


class TreeLM(HFLM):
    """`hf` with a drafter: `pretrained`, `drafter`, `dtype` as for `load_pair`; `nodes=0` decodes plainly.

    Requests that generate are decoded one by one; `batch_size` is of log-likelihoods. What else `hf` takes is its.
    """

    batch_size_per_gpu: Any

    def __init__(
        self,
        pretrained: str = "demo",
        drafter: str | None = None,
        dtype: str = "auto",
        nodes: int = OptTree.nodes,
        threshold: float = OptTree.threshold,
        max_depth: int = OptTree.max_depth,
        device: str | None = None,
        **options: Any,
    ) -> None:
        pair = load_pair(pretrained, drafter, dtype=dtype, device=_device(device))
        super().__init__(pretrained=pair.target.model, tokenizer=pair.tokenizer, backend="causal", **options)
        policy = OptTree(nodes, threshold, max_depth) if nodes else Static.empty()
        self.decoder = Decoder(pair.target, pair.drafter, policy)

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> Any:
        kept, self.batch_size_per_gpu = self.batch_size_per_gpu, 1
        try:
            return super().generate_until(requests, disable_tqdm)
        finally:
            self.batch_size_per_gpu = kept

    def _model_generate(self, context: Any, max_length: int, stop: list[str], **generation_kwargs: Any) -> Any:
        return super()._model_generate(
            context, max_length, stop, custom_generate=custom_generate(self.decoder), **generation_kwargs
        )


def _device(given: str | None) -> str | None:
    """Leave out the command line's default, the first GPU, where there is none: `hf` takes the CPU then as well."""
    return given if given != str(torch.device("cuda", 0)) or torch.cuda.is_available() else None
