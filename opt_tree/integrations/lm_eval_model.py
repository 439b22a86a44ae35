"""A model for lm-eval, the evaluation harness: its generations are drafted, its log-likelihoods are transformers' own.

lm-eval 0.4.13 keeps models in a registry and reads no entry points. So this is its command line with one more model:

    python -m opt_tree.integrations.lm_eval_model run --model opt-tree \\
        --model_args pretrained=demo,nodes=12 --tasks TASKS

The answers are those of `--model hf`; they come sooner. lm-eval is no dependency of the library: `pip install lm-eval`.
What stands below `main` needs it.
"""

import sys

NAME = "opt-tree"


def register() -> None:
    """Make `opt-tree` known to lm-eval, which imports this file by its name for it."""
    from lm_eval.api.registry import model_registry

    if NAME not in model_registry:
        model_registry.register(NAME, target="opt_tree.integrations.lm_eval_model:TreeLM")


def main() -> int:
    """Run lm-eval's command line, where `--model opt-tree` is known."""
    try:
        from lm_eval.__main__ import cli_evaluate
    except ImportError:
        sys.exit("error: lm-eval is not installed: pip install lm-eval")
    register()
    cli_evaluate()
    return 0


if __name__ == "__main__":
    sys.exit(main())

from typing import Any

import torch
from lm_eval.models.huggingface import HFLM

from opt_tree.decoder import Decoder
from opt_tree.integrations.hf_generate import custom_generate
from opt_tree.methods.policies.static import Static
from opt_tree.policy import OptTree
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
