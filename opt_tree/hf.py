"""The door for `model.generate(**inputs, custom_generate=decoder)`.

Translates what transformers prepared (processors, stopping criteria, generation config) into the loop's words and the
result back. Decodes nothing itself.
"""

from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation import GenerateDecoderOnlyOutput

from opt_tree.decode import Decoder
from opt_tree.lm import CausalLM
from opt_tree.sampling import Sampling
from opt_tree.stopping import Stop
from opt_tree.support import unwrapped

_PER_TOKEN_OUTPUTS = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")


def custom_generate(
    decoder: Decoder,
    model: PreTrainedModel,
    input_ids: Int[Tensor, "batch length"],
    logits_processor: LogitsProcessorList | None = None,
    stopping_criteria: StoppingCriteriaList | None = None,
    generation_config: GenerationConfig | None = None,
    streamer: Any = None,
    tokenizer: Any = None,
    stop_strings: str | list[str] | None = None,
    seed: int | None = None,
    **model_kwargs: Any,
) -> Int[Tensor, "batch longer"] | GenerateDecoderOnlyOutput:
    """Generate as `transformers` would have: ids, or the output object where `return_dict_in_generate` asks for it.

    Without `seed`, sampling draws one from torch's global generator, so `torch.manual_seed` governs it as usual. What a
    tree cannot give (beams, several sequences, per-token scores, padding) is refused in one line.
    """
    config = generation_config or GenerationConfig()
    if not isinstance(decoder.target, CausalLM) or unwrapped(model) is not unwrapped(decoder.target.model):
        raise ValueError(f"this decoder was made for {decoder.target.name}, not for the model that generates")
    if (config.num_beams or 1) > 1:
        raise ValueError(f"num_beams={config.num_beams}: draft trees decode by argmax or by sampling, not by beams")
    if model_kwargs.get("inputs_embeds") is not None:
        raise ValueError("inputs_embeds: draft trees continue token ids; pass input_ids")
    mask = model_kwargs.get("attention_mask")
    if mask is not None and not bool((mask == 1).all()):
        raise ValueError("the attention mask hides some tokens (padding?); pass one unpadded prompt")
    asked = [name for name in _PER_TOKEN_OUTPUTS if getattr(config, name, False)]
    if asked and config.return_dict_in_generate:
        raise ValueError(f"{', '.join(asked)}: not kept by draft-tree decoding; use Decoder.steps for a trace")

    stop = Stop(strings=_as_tuple(stop_strings), tokenizer=tokenizer)
    criteria = stopping_criteria or StoppingCriteriaList()
    prompt = input_ids.to("cpu")

    def should_stop(generated: list[int]) -> str | None:
        ids = torch.cat([prompt, torch.tensor([generated])], 1).to(input_ids.device)
        # None for the scores, as in transformers' own assisted decoding, which has no single row of them either.
        return "criteria" if bool(criteria(ids, None).all()) else stop(generated)  # type: ignore[arg-type]

    sampled = bool(config.do_sample)
    sampling = Sampling(1.0 if sampled else 0.0, processors=tuple(logits_processor or ()))
    if seed is None:
        seed = int(torch.randint(2**62, ())) if sampled else 0
    room = max(1, (config.max_length or 20) - input_ids.shape[1])
    result = decoder.generate(input_ids, room, sampling, should_stop, streamer, seed)
    sequences = torch.tensor([result.prompt + result.tokens], device=input_ids.device)
    if config.return_dict_in_generate:
        return GenerateDecoderOnlyOutput(sequences=sequences)  # type: ignore[arg-type]
    return sequences


def _as_tuple(strings: str | list[str] | None) -> tuple[str, ...]:
    return (strings,) if isinstance(strings, str) else tuple(strings or ())
