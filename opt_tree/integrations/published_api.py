"""The published code's classes, as thin shims: `SPModel.spgenerate` and `EaModel.eagenerate`.

Arguments and returned ids are the published ones; the defects are not (README, "Differences from the published code").
"""

from typing import Any, Self

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from opt_tree.decoder import Decoder
from opt_tree.methods.sampling import Sampling
from opt_tree.policy import OptTree
from opt_tree.tools.pair import Pair, load_pair


class _Published:
    """What both classes share: a pair, and one generate call in the published signature."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair

    @property
    def base_model(self) -> torch.nn.Module:
        """The unmodified transformers model."""
        return self.pair.target.model

    def get_tokenizer(self) -> PreTrainedTokenizerBase:
        return self.pair.tokenizer

    def eval(self) -> Self:
        """Models are always in evaluation mode here; kept because the published scripts call it."""
        return self

    training = False
    """The published scripts print it behind `eval()`."""

    def _generate(
        self,
        input_ids: Int[Tensor, "1 length"],
        temperature: float = 0.0,
        top_p: float = 0.0,
        top_k: float = 0.0,
        max_new_tokens: int = 512,
        max_length: int = 2048,
        nodes: int = 50,
        threshold: float = 0.5,
        max_depth: int = 10,
        print_time: bool = False,
    ) -> Int[Tensor, "1 longer"]:
        """Return prompt and new tokens, at most `max_new_tokens` of them and `max_length` in all.

        `top_p` and `top_k` of 0 mean off, as published; `print_time` prints each step's seconds. Sampling draws its
        seed from torch's global generator.
        """
        sampled = temperature > 1e-5
        sampling = Sampling(temperature, top_p if 0 < top_p < 1 else 1.0, int(top_k)) if sampled else Sampling()
        decoder = Decoder(self.pair.target, self.pair.drafter, OptTree(nodes, threshold, max_depth))
        room = min(max_new_tokens, max_length - input_ids.shape[-1])
        if room < 1:
            raise ValueError(
                f"the prompt has {input_ids.shape[-1]} tokens, which leaves no room in max_length={max_length}"
            )
        seed = int(torch.randint(2**62, ())) if sampled else 0
        result = decoder.generate(input_ids, room, sampling, self.pair.stop, seed=seed)
        if print_time:
            for index, step in enumerate(result.steps):
                print(f"step {index}: {step.times.total:.4f} s, {step.accepted} accepted")
        return torch.tensor([result.prompt + result.tokens], device=input_ids.device)


class SPModel(_Published):
    """OPT-Tree with an independent draft model, as published in `opt_classic`."""

    @classmethod
    def from_pretrained(
        cls, Type: str = "LLaMA", base_model_path: str = "demo", draft_model_path: str = "demo", **options: Any
    ) -> Self:
        """Load both models. Options are those of the published code (`torch_dtype`, `device_map`, ...).

        `Type` is ignored, here as in the published code: the config decides.
        """
        return cls(load_pair(base_model_path, draft_model_path, **_translate(options)))

    spgenerate = _Published._generate


class EaModel(_Published):
    """OPT-Tree with an EAGLE head, as published in `opt_eagle`."""

    @classmethod
    def from_pretrained(
        cls, Type: str = "LLaMA", base_model_path: str = "demo", ea_model_path: str = "demo", **options: Any
    ) -> Self:
        """Load the target and its head. `Type` is ignored, here as in the published code: the config decides."""
        return cls(load_pair(base_model_path, eagle=ea_model_path, **_translate(options)))

    eagenerate = _Published._generate


_ELSEWHERE = {
    "load_in_8bit": 'weights="int8" quantises on a CPU, quantization_config= elsewhere',
    "load_in_4bit": 'weights="int4" quantises on a CPU, quantization_config= elsewhere',
    "total_token": "nodes= of the generate call says how many tokens are drafted",
    "depth": "max_depth= of the generate call says how many layers are drafted",
    "top_k": "OPT-Tree has no top_k of children: nodes= and threshold= of the generate call shape the tree",
    "threshold": "threshold= is an argument of the generate call",
    "use_eagle3": "opt_tree.load_pair(target, drafter='eagle3:PATH') loads an EAGLE-3 head",
}
"""Options of `from_pretrained`, of the published code or of EAGLE's, that are something else here, or nowhere."""


def _translate(options: dict[str, Any]) -> dict[str, Any]:
    """Take the published options in today's words: `torch_dtype` is `dtype`; low memory use is the default.

    TypeError for one that is somewhere else here; `False` and None ask for nothing.
    """
    options = {name: value for name, value in options.items() if name not in _ELSEWHERE or value not in (None, False)}
    for name in options.keys() & _ELSEWHERE.keys():
        raise TypeError(f"{name}={options[name]!r} is not taken here: {_ELSEWHERE[name]}")
    options.pop("low_cpu_mem_usage", None)
    dtype = options.pop("torch_dtype", None)
    return options if dtype is None else {"dtype": dtype} | options
