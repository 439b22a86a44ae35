"""The door for `model.generate(**inputs, custom_generate=opt_tree.custom_generate(decoder))`.

Translates what transformers prepared (processors, stopping criteria, generation config, cache, media) into the loop's
words and the result back. Decodes nothing itself. An argument is honoured or refused in one line, never swallowed:
docs/generate.md has the table, tests/integrations/test_hf_options.py goes through it.
"""

import inspect
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
from jaxtyping import Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    Cache,
    DynamicCache,
    GenerationConfig,
    GenerationMixin,
    LogitsProcessorList,
    MaxLengthCriteria,
    PreTrainedModel,
    StoppingCriteriaList,
    StopStringCriteria,
)
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.generation.stopping_criteria import EosTokenCriteria
from transformers.utils import logging

from opt_tree.backends.batch.side_by_side import side_by_side
from opt_tree.decoder import Decoder
from opt_tree.errors import counted
from opt_tree.generation import Generation
from opt_tree.integrations.left_padding import AtRow, PaddedRow, padded, padded_cache, unpadded
from opt_tree.methods.processors import History
from opt_tree.methods.recorder import Recorder
from opt_tree.methods.sampling import Sampling
from opt_tree.models.capabilities import CACHE_NAMES, cache_name, unwrapped, virtual_tokens
from opt_tree.models.causal_lm import CausalLM
from opt_tree.models.chain_lm import AnyLM, ChainLM
from opt_tree.models.given_rows import hand_over
from opt_tree.request import check_prompt

_log = logging.get_logger(__name__)

_INSIDE = ("output_attentions", "output_hidden_states")
_OTHER_METHODS = {
    "penalty_alpha": "contrastive search",
    "dola_layers": "DoLa",
    "constraints": "constrained beam search",
    "force_words_ids": "constrained beam search",
    "use_mtp": "multi-token prediction",
    "prompt_lookup_num_tokens": "prompt lookup",
    "assistant_early_exit": "early exit",
    "assistant_ensemble_weight": "an ensemble with the assistant",
    "speculation_type": "another speculation",
    "is_assistant": "drafting for another model",
}
"""Fields of a GenerationConfig that ask for another way of decoding."""
_PLAIN_INPUTS = {"attention_mask", "position_ids", "cache", "use_cache", "logits_to_keep"}
_ENCODED = "mm_encoder_outputs"
"""What `generate` makes of pixel_values before it calls the decoder."""
_MEDIA: Mapping[str, frozenset[str]] = {
    "llava": frozenset({_ENCODED, "pixel_values", "image_sizes"}),
    "gemma3": frozenset({_ENCODED, "pixel_values", "token_type_ids", "mm_token_type_ids"}),
}
"""Inputs that a model type takes with the prompt only, where a test proves it exact (test_hf_media.py)."""
_REASONS = {
    "MaxLengthCriteria": "length",
    "EosTokenCriteria": "stop_token",
    "StopStringCriteria": "stop_string",
    "MaxTimeCriteria": "time",
}


@dataclass
class TreeOutput(GenerateDecoderOnlyOutput):
    """What transformers returns where `return_dict_in_generate` asks for it, and why the generation ended."""

    # As transformers fills them: a tensor for each new token. Its own annotations say one.
    scores: tuple[Tensor, ...] | None = None  # type: ignore[assignment]
    logits: tuple[Tensor, ...] | None = None  # type: ignore[assignment]
    finish_reason: str | list[str] | None = None
    """"length", "stop_token", "stop_string", "time", "context" (the model's context is full), or the class of the
    stopping criterion; of a batch a list with one for each row."""


def custom_generate(decoder: Decoder, **given: Any) -> Callable[..., Any]:
    """Return what `model.generate(**inputs, custom_generate=...)` calls to decode with `decoder`.

    Arguments:
        given: `tokenizer`, `stop_strings`, `streamer`, `seed`: those that hold for every call. transformers passes a
            callable no tokenizer, which stop strings need.

    Raises TypeError for any other name.
    """
    if unknown := given.keys() - {"tokenizer", "stop_strings", "streamer", "seed"}:
        raise TypeError(f"custom_generate takes tokenizer, stop_strings, streamer and seed, got {min(unknown)}")

    # transformers hands over what this signature names, so `generate(..., seed=7)` reaches it.
    def serve(
        model: PreTrainedModel,
        input_ids: Int[Tensor, "batch length"],
        stop_strings: str | list[str] | None = None,
        seed: int | None = None,
        **prepared: Any,
    ) -> Any:
        own = {"stop_strings": stop_strings, "seed": seed, **prepared}
        options = given | {name: value for name, value in own.items() if value is not None or name not in given}
        return decoder.led(lambda: _generate(decoder, model, input_ids, **options))

    return serve


def _generate(
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
) -> Int[Tensor, "batch longer"] | TreeOutput:
    """Generate as `transformers` would have: ids, or the output object where `return_dict_in_generate` asks for it.

    Without `seed`, sampling draws one from torch's global generator, so `torch.manual_seed` governs it as usual. The
    rows of a batch, padded on the left, are decoded side by side, row r with `seed + r`. What a tree cannot give
    (beams, attentions) is refused in one line.
    """
    caches = [model_kwargs.pop(name, None) for name in CACHE_NAMES]
    given = next((cache for cache in caches if cache is not None), None)
    # What transformers made by itself is empty.
    model_kwargs["cache"] = given if getattr(given, "_is_user_defined", False) else None
    kept = _kept_by_generate(model)
    if streamer is not None or kept["streamer"] is not None:
        streamer = _EndedOnce(kept["streamer"], True) if streamer is None else _EndedOnce(streamer, False)
    try:
        config = generation_config or GenerationConfig()
        target = _target(decoder, model)
        _check_method(config, kept)
        prompts = _check_inputs(input_ids, config, model_kwargs)
        alone = len(prompts) == 1 and len(prompts[0]) == input_ids.shape[1]
        goes_on = _goes_on(target, input_ids, model_kwargs, alone)
        start = nullcontext() if goes_on else _start(decoder, input_ids, config, model_kwargs, alone)
        sampled = bool(config.do_sample)
        if seed is None:
            seed = int(torch.randint(2**62, ())) if sampled else 0
        criteria = StoppingCriteriaList(stopping_criteria or ())
        if stop_strings:
            criteria.append(_stop_strings(stop_strings, tokenizer))
        pad = _pad_token(config, criteria, len(prompts))
        asked = _Asked(input_ids, prompts, tuple(logits_processor or ()), criteria, config, goes_on)
        with decoder.locked():
            with start:
                results, recorders = _decode(decoder, asked, 1.0 if sampled else 0.0, streamer, seed)
            sequences = padded(input_ids, [result.tokens for result in results], pad)
            cache = _returned_cache(target, sequences[:, :-1], config, model_kwargs, alone)
    except BaseException:
        if streamer is not None:
            streamer.end()  # whoever reads it in another thread would wait for ever
        raise
    for result in results:
        if result.finish_reason == "context":
            _log.warning(
                f"stopped after {counted(len(result.tokens), 'new token')} (finish reason: context): "
                f"{target.max_context} tokens{target.context_note} are all that {target.name} has room for; plain "
                "generate would go on past them"
            )
    if config.return_dict_in_generate:
        reasons = [result.finish_reason for result in results]
        return TreeOutput(  # type: ignore[call-arg]
            sequences=cast(Any, sequences),
            **cast(Any, {"cache" if hasattr(TreeOutput, "cache") else "past_key_values": cache}),
            scores=_per_token("scores", recorders, results, input_ids.device) if config.output_scores else None,
            logits=_per_token("logits", recorders, results, input_ids.device) if config.output_logits else None,
            finish_reason=reasons[0] if len(reasons) == 1 else reasons,
        )
    return sequences


@dataclass
class _Asked:
    """What `generate` asks of each row."""

    input_ids: Int[Tensor, "batch length"]
    prompts: list[list[int]]
    """The rows without their padding."""
    processors: tuple[Any, ...]
    criteria: StoppingCriteriaList
    config: GenerationConfig
    goes_on: bool
    """Whether the text is what the decoder's own cache holds already, and more."""


def _pad_token(config: GenerationConfig, criteria: StoppingCriteriaList, rows: int) -> int:
    """The token behind shorter answers. Raises ValueError where there is none and answers may differ in length."""
    pad = config.pad_token_id
    if pad is None and (chosen := getattr(config, "_pad_token_tensor", None)) is not None:
        pad = int(chosen)  # by transformers: the first stop token
    if pad is None and rows > 1 and any(not isinstance(criterion, MaxLengthCriteria) for criterion in criteria):
        raise ValueError(f"{rows} prompts may end at different lengths: pass pad_token_id")
    return pad or 0


def _per_token(
    what: str, recorders: list[Recorder | None], results: list[Generation], device: torch.device
) -> tuple[Tensor, ...]:
    """What was kept, as `generate` returns it: [batch, vocab] for each new token, 0 behind the end of an answer."""
    found = zip(recorders, results, strict=True)
    kept = [recorder.rows(what, len(result.tokens)).to(device) for recorder, result in found if recorder is not None]
    return pad_sequence(kept).unbind() if len(kept) > 1 else kept[0].split(1)


def _decode(
    decoder: Decoder, asked: _Asked, temperature: float, streamer: Any, seed: int
) -> tuple[list[Generation], list[Recorder | None]]:
    """Answer every row, side by side; with the rows of logits, where they are asked for."""
    room = max(1, (asked.config.max_length or 20) - asked.input_ids.shape[1])
    if streamer is not None and len(asked.prompts) > 1:
        raise ValueError(f"streamer: it takes one prompt, these are {len(asked.prompts)}")
    Sampling(processors=asked.processors)  # refuses what keeps state
    jobs, recorders = [], list[Recorder | None]()
    config = asked.config
    rows = [
        kind for kind in ("scores", "logits") if config.return_dict_in_generate and getattr(config, f"output_{kind}")
    ]
    for place, prompt in enumerate(asked.prompts):
        recorders.append(Recorder(rows=rows) if rows else None)
        row = PaddedRow(asked.input_ids, place, len(prompt))
        processors = asked.processors if row.is_all else tuple(AtRow(one, row) for one in asked.processors)
        options = (room, Sampling(temperature, processors=processors), _Criteria(prompt, row, asked.criteria))
        check_prompt(prompt, decoder.target)
        jobs.append(
            lambda own, prompt=prompt, options=options, place=place: own.answer(
                prompt, *options, streamer, seed + place, asked.goes_on, recorders[place]
            )
        )
    found = dict(side_by_side(decoder, jobs, len(jobs)))
    return [found[place] for place in range(len(jobs))], recorders


class _Criteria:
    """transformers' stopping criteria as a rule of the loop: asked after every token, told the whole text."""

    def __init__(self, prompt: list[int], row: PaddedRow, criteria: StoppingCriteriaList) -> None:
        self._row, self._criteria = row, criteria
        ends = [one.eos_token_id for one in criteria if isinstance(one, EosTokenCriteria)]
        self.tokens = frozenset(token for ids in ends for token in ids.flatten().tolist())
        """At which the loop knows that the text ends."""
        self._history = History([*row.padding[0].tolist(), *prompt])
        self._before = len(self._history.tokens)

    def __call__(self, generated: list[int]) -> str | None:
        text = self._history.tokens
        text += generated[len(text) - self._before :]  # what has been told already stays
        ids = self._history.ids(self._row.padding.device).expand(self._row.rows, -1)
        # None for the scores, as in transformers' own assisted decoding, which has no single row of them either.
        met = [bool(self._row.own(criterion(ids, None)).all()) for criterion in self._criteria]  # type: ignore[arg-type]
        names = [type(criterion).__name__ for criterion, done in zip(self._criteria, met, strict=True) if done]
        return _REASONS.get(names[0], names[0]) if names else None


class _EndedOnce:
    """A streamer that is ended once, and is not given what `generate` has given it already: the prompt."""

    def __init__(self, streamer: Any, prompted: bool) -> None:
        self._streamer, self._left_out, self._ended = streamer, prompted, False

    def put(self, value: Tensor) -> None:
        if not self._left_out:
            self._streamer.put(value)
        self._left_out = False

    def end(self) -> None:
        if not self._ended:
            self._streamer.end()
        self._ended = True


def _kept_by_generate(model: Any) -> dict[str, Any]:
    """Return what `generate` was given and passes to no callable, read from its frame; there is no other way to it.

    Without a look, a streamer's reader would wait for ever and an assistant would be forgotten without a word.
    """
    names, code = ("streamer", "assistant_model", "synced_gpus"), inspect.unwrap(GenerationMixin.generate).__code__
    frame = inspect.currentframe()
    while frame is not None and not (frame.f_code is code and frame.f_locals.get("self") is model):
        frame = frame.f_back
    return dict.fromkeys(names) if frame is None else {name: frame.f_locals.get(name) for name in names}


def _target(decoder: Decoder, model: Any) -> AnyLM:
    """Return the decoder's target, which must be the model that generates."""
    if not isinstance(decoder.target, CausalLM | ChainLM) or unwrapped(model) is not unwrapped(decoder.target.model):
        raise ValueError(f"this decoder was made for {decoder.target.name}, not for the model that generates")
    # While a PEFT model generates, its own preparation stands in for that of the model inside.
    prepare = vars(model).get("prepare_inputs_for_generation")
    if virtual_tokens(getattr(prepare, "__self__", None)):
        raise ValueError("PEFT prompt or prefix tuning: its virtual tokens are not in a tree's forward")
    return decoder.target


def _check_method(config: GenerationConfig, kept: Mapping[str, Any]) -> None:
    """Raise for another way of decoding than argmax or sampling of one sequence, and for outputs that are not kept."""
    if (config.num_beams or 1) > 1:
        raise ValueError(f"num_beams={config.num_beams}: draft trees decode by argmax or by sampling, not by beams")
    for name, method in _OTHER_METHODS.items():
        if value := getattr(config, name, None):
            raise ValueError(f"{name}={value!r} asks for {method}: this decoder has its own way; leave it out")
    if kept["assistant_model"] is not None:
        raise ValueError("assistant_model: the decoder has a drafter of its own; leave it out")
    if kept["synced_gpus"]:
        raise ValueError("synced_gpus: trees of different shapes do not keep several processes in step")
    if config.cache_implementation == "quantized":
        raise ValueError("cache_implementation='quantized': the decoder keeps its rows as the model made them")
    asked = [name for name in _INSIDE if getattr(config, name, False)]
    if asked and config.return_dict_in_generate:
        raise ValueError(f"{', '.join(asked)}: draft-tree decoding keeps nothing of a model's inside")


def _check_inputs(
    input_ids: Int[Tensor, "batch length"], config: GenerationConfig, inputs: Mapping[str, Any]
) -> list[list[int]]:
    """Return the prompts without padding. Raises for inputs that a tree's forward would not see."""
    if inputs.get("inputs_embeds") is not None:
        raise ValueError("inputs_embeds: draft trees continue token ids; pass input_ids")
    mask = inputs.get("attention_mask")
    length = input_ids.shape[1]
    covered = getattr(config, "_mask_length", length) if mask is None else mask.shape[-1]
    if covered != length or (mask is not None and mask.shape != input_ids.shape):
        seen = counted(covered, "token")
        raise ValueError(f"the attention mask covers {seen}, input_ids are {length}: pass the whole text")
    prompts, positions = unpadded(input_ids, mask), inputs.get("position_ids")
    for row, prompt in zip(positions if positions is not None else (), prompts, strict=False):
        if not bool((row[-len(prompt) :] == torch.arange(len(prompt), device=row.device)).all()):
            raise ValueError(
                f"position_ids: draft trees count positions from 0 to {len(prompt) - 1}, and these are others; leave "
                "them out"
            )
    return prompts


def _goes_on(target: AnyLM, input_ids: Int[Tensor, "batch length"], inputs: Mapping[str, Any], alone: bool) -> bool:
    """Whether the cache that was given is what this decoder returned for its last text: then its own one goes on.

    Compared token for token and row for row: so the drafter goes on as well, whatever it reads of the target.
    """
    past = inputs.get("cache")
    plain = all(value is None or name in _PLAIN_INPUTS for name, value in inputs.items())
    if (
        not (alone and plain)
        or type(past) is not DynamicCache
        or not isinstance(target, CausalLM)
        or target.ranks is not None
    ):
        return False
    return 0 < past.get_seq_length() < input_ids.shape[1] and target.begins_with(past, input_ids[0].tolist())


def _start(
    decoder: Decoder,
    input_ids: Int[Tensor, "batch length"],
    config: GenerationConfig,
    inputs: Mapping[str, Any],
    alone: bool,
) -> AbstractContextManager:
    """Return the context in which the prompt begins with rows that transformers computed: a given cache, or media."""
    target, past = cast(AnyLM, decoder.target), cast(Any, inputs.get("cache"))
    kind = target.model.config.model_type
    media = {name: value for name, value in inputs.items() if name not in _PLAIN_INPUTS and value is not None}
    if not media.get(_ENCODED, True):  # it is there, and empty, where there is no image either
        del media[_ENCODED]
    if unknown := sorted(media.keys() - _MEDIA.get(kind, frozenset())):
        unknown = ["pixel_values" if name == _ENCODED else name for name in unknown]
        raise ValueError(f"{', '.join(unknown)}: a tree's forward of {kind} would not see it; leave it out")
    if past is None and not media:
        return nullcontext()
    if why := _not_taken(decoder, past, bool(media), alone):
        raise ValueError(f"{', '.join(sorted(media)) or 'cache'}: {why}")
    assert isinstance(target, CausalLM)
    if media:
        return target.given(_prefilled(target.model, input_ids, media))
    if (rows := past.get_seq_length()) >= input_ids.shape[1]:
        raise ValueError(
            f"the cache holds {counted(rows, 'token')}, input_ids {input_ids.shape[1]}: "
            "the text must be longer than that"
        )
    return target.given(past) if rows else nullcontext()


def _not_taken(decoder: Decoder, past: Any, media: bool, alone: bool) -> str | None:
    """Why a prompt cannot begin with the rows of a given cache, or of media; None: it can."""
    target, drafter, policy = cast(AnyLM, decoder.target), decoder.drafter, decoder.policy
    if not alone:
        return "with one prompt without padding only"
    if target.ranks is not None:
        return "the model is spread over processes, which follow text alone; leave it out"
    if isinstance(target, ChainLM):
        return f"{target.name} is scored path by path from its own cache, which is of text alone; leave it out"
    if target.recurrent:
        return f"{target.name} goes on from the state of its layers, which is of text alone; leave it out"
    if not isinstance(past, DynamicCache | None):
        return f"a {type(past).__name__} is given, and only a DynamicCache can be continued"
    filled = past is not None and past.get_seq_length() > 0
    if media and filled:
        return "it comes behind a filled cache: pass one of them"
    reader: object = drafter.bare if drafter is not None and (drafter.features or drafter.reads_logits) else None
    if reader is None and policy.features:
        reader = policy
    if reader is not None and (media or filled):
        other = "" if media else "; it goes on from the cache that this decoder returned last, unchanged"
        return f"{type(reader).__name__} reads what the target made of every token{other}"
    return None


@torch.inference_mode()
def _prefilled(model: Any, input_ids: Int[Tensor, "batch length"], media: dict[str, Any]) -> DynamicCache:
    """Let the model take in a prompt with media by itself; its last token, which will be the root, must be text."""
    kinds = media.get("mm_token_type_ids", media.get("token_type_ids"))
    image = getattr(model.config, "image_token_id", None)
    if int(input_ids[0, -1]) == image or (kinds is not None and int(kinds[0, -1])):
        raise ValueError("the prompt ends with an image: draft trees grow from a token of text")
    cache = DynamicCache()
    inputs = model.prepare_inputs_for_generation(
        input_ids[:, :-1],
        **{cache_name(unwrapped(model)) or "cache": cache},
        is_first_iteration=True,
        use_cache=True,
        **{name: value[:, :-1] if name.endswith("token_type_ids") else value for name, value in media.items()},
    )
    model(**inputs)
    return cache


def _returned_cache(
    target: AnyLM, ids: Int[Tensor, "batch _"], config: GenerationConfig, inputs: Mapping[str, Any], alone: bool
) -> Cache | None:
    """Return the rows of the text without its last token, as `generate` leaves them; into the caller's own cache.

    Those of a batch are computed once more: side by side each text has rows of its own length, without padding.
    """
    cache = inputs.get("cache")
    if cache is None and not (config.return_dict_in_generate and config.use_cache):
        return None
    if target.ranks is not None:
        return None  # rank 0 has its own part of the rows, and tells the others of text
    if cache is None:
        cache = DynamicCache(config=target.model.config.get_text_config(decoder=True))
    if not alone:
        return padded_cache(target.model, ids, inputs.get("attention_mask"), cache)
    tokens = ids[0].tolist()
    if isinstance(target, ChainLM):
        return target.cache_of(tokens)
    if target.recurrent:  # which keeps the state behind the last token, too
        past: dict[str, Any] = {cache_name(unwrapped(target.model)) or "past_key_values": cache}
        with torch.no_grad():
            target.model(torch.tensor([tokens], device=target.device), use_cache=True, **past)
        return cache
    hand_over(target.cache, cache, len(tokens))
    return cache


def _stop_strings(strings: str | list[str], tokenizer: Any) -> StopStringCriteria:
    if tokenizer is None:
        raise ValueError(
            "stop strings need the tokenizer, which generate keeps to itself: "
            "custom_generate(decoder, stop_strings=, tokenizer=)"
        )
    return StopStringCriteria(tokenizer, strings)
