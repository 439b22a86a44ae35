"""Ways to decode: the library's loop, and `transformers`' own decoding on the same model objects, timed.

The plain loop with an empty tree is a decoder of the library (`opt_tree.tools.presets.plain`).
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel, logging

from evaluation.timing import Method, Timed
from opt_tree import CausalLMDrafter, Decoder, Drafter, Generation, Pair, Sampling
from opt_tree.methods.drafters.small_models.chain_lm import ChainLMDrafter
from opt_tree.request import StopRule
from opt_tree.target import Asking

LOOKUP = 10
"""Tokens that prompt lookup drafts at most: the setting of transformers' own examples."""


@dataclass(frozen=True)
class InLoop:
    """The library's loop as a method."""

    decoder: Decoder
    sampling: Sampling = field(default_factory=Sampling)
    stop: StopRule | None = None
    forget: bool = False
    """Whether a drafter that learns begins each answer with nothing: as it must where it sees a text more than once."""

    heard: Callable[[Generation], Generation] = lambda made: made
    """What is made of each answer."""

    def __call__(self, prompt: list[int], limit: int, seed: int = 0) -> Generation:
        return self.decoder.compute(self.ask(prompt, limit, seed))

    def ask(self, prompt: list[int], limit: int, seed: int = 0) -> Asking[Generation]:
        """The same, as a generator of the forwards that it needs."""
        if self.forget and self.decoder.drafter is not None:
            self.decoder.drafter.clear()
        return self.heard((yield from self.decoder.answer(prompt, limit, self.sampling, self.stop, seed=seed)))


def transformers_methods(
    pair: Pair, assistant: PreTrainedModel | None, sampling: Sampling = Sampling()
) -> dict[str, Method]:
    """Return what transformers can do with this target, by name; assisted only where there is an assistant."""
    known: dict[str, dict[str, Any]] = {
        "transformers": {},
        "transformers, prompt lookup": {"prompt_lookup_num_tokens": LOOKUP},
    }
    if assistant is not None:
        logging.set_verbosity_error()  # from here on: transformers' assisted generation warns of its own configuration
        known["transformers, assisted"] = assisted_by(assistant, pair, sampling)
    return {name: partial(transformers_greedy, pair, sampling=sampling, **options) for name, options in known.items()}


def transformers_greedy(
    pair: Pair, prompt: list[int], max_new_tokens: int, seed: int = 0, sampling: Sampling = Sampling(), **options: Any
) -> Timed:
    """Decode one prompt, timed, as `transformers_batch` does: greedy, or sampled where `sampling` says so."""
    if not sampling.greedy:
        torch.manual_seed(seed)
    begin = time.perf_counter()
    (tokens,) = transformers_batch(pair, [prompt], max_new_tokens, sampling, **options)
    return Timed(tokens, time.perf_counter() - begin)


def assisted_by(assistant: PreTrainedModel, pair: Pair, sampling: Sampling = Sampling()) -> dict[str, Any]:
    """The options of `model.generate` for an assistant, with transformers' own settings for the draft length.

    The assistant has whatever dtype it has: only token ids pass between the two (and at temperature > 0 float32
    scores). Raises ValueError for one of another vocabulary that would have to sample.
    """
    ours, theirs = (m.config.get_text_config().vocab_size for m in (pair.target.model, assistant))
    if ours == theirs:
        return {"assistant_model": assistant}
    if not sampling.greedy:
        # transformers would replace the assistant's output layer by a pruned one, in the model we share with it.
        raise ValueError(f"transformers samples no assistant of {theirs} tokens for a target of {ours}")
    # The same tokenizer padded to another size: transformers then insists on its re-encoding path.
    return {"assistant_model": assistant, "tokenizer": pair.tokenizer, "assistant_tokenizer": pair.tokenizer}


def assistant_of(drafter: Drafter) -> PreTrainedModel | None:
    """Return the causal LM inside a drafter, which can assist transformers' generate; None for an EAGLE head.

    None for a trimmed one, too: its logits are of a part of the vocabulary, which transformers would not know.
    """
    bare = drafter.bare
    if not isinstance(bare, CausalLMDrafter | ChainLMDrafter) or getattr(bare, "tokens", None) is not None:
        return None
    return bare.lm.model


def transformers_batch(
    pair: Pair, prompts: Sequence[list[int]], max_new_tokens: int, sampling: Sampling = Sampling(), **options: Any
) -> list[list[int]]:
    """Decode a batch, padded on the left, with unmodified `model.generate`; return the new tokens of each prompt.

    Same model object, stop tokens and context limit as the library's loop; whatever the checkpoint's own generation
    defaults would change (a repetition penalty, say) is switched off, as it is there. `options` are `generate`'s.
    """
    longest = max(map(len, prompts))
    config = _config(pair, longest, max_new_tokens, sampling)
    empty = [longest - len(prompt) for prompt in prompts]
    ids = torch.tensor([[config.pad_token_id] * n + prompt for n, prompt in zip(empty, prompts, strict=True)])
    mask = torch.tensor([[0] * n + [1] * len(prompt) for n, prompt in zip(empty, prompts, strict=True)])
    model, device = pair.target.model, pair.target.device
    # `generate` fills up with the checkpoint's defaults what a config leaves open.
    kept, model.generation_config = model.generation_config, GenerationConfig()
    try:
        output = model.generate(ids.to(device), attention_mask=mask.to(device), generation_config=config, **options)
    finally:
        model.generation_config = kept
    found = []
    for tokens in output[:, longest:].tolist():  # type: ignore[index]
        end = next((place for place, token in enumerate(tokens) if token in pair.stop.tokens), len(tokens))
        found.append(tokens[: end + 1])
    return found


def _config(pair: Pair, length: int, max_new_tokens: int, sampling: Sampling) -> GenerationConfig:
    """The library's stop tokens and context limit, behind a prompt of this length, and nothing of the checkpoint's."""
    stops = sorted(pair.stop.tokens)
    pad = pair.tokenizer.pad_token_id
    config = GenerationConfig(
        max_new_tokens=min(max_new_tokens, pair.target.max_context - length),
        use_cache=True,
        eos_token_id=stops or None,
        pad_token_id=pad if pad is not None else stops[0] if stops else 0,
        do_sample=not sampling.greedy,
    )
    if not sampling.greedy:
        config.update(temperature=float(sampling.temperature), top_p=float(sampling.top_p), top_k=sampling.top_k)
    return config
