"""`Sampling` against the processors that transformers would build."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from table_models import TableDrafter, TableTarget, hashed_laws
from torch import Tensor
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LogitsProcessorList,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
)
from transformers.generation import logits_process

from opt_tree import Decoder, OptTree, Sampling, Static, Tree
from opt_tree.methods import processors as processors_module
from opt_tree.methods.children.draws import whole
from opt_tree.sampling import LazyLogits

VOCAB = 12
CONTEXT = [3, 5, 3, 1]
TREE = Tree(
    tokens=np.array([1, 5, 3, 5, 7, 3]),  # the path 1 5 5 repeats, 1 3 3 repeats, siblings share nothing
    parents=np.array([-1, 0, 0, 1, 1, 2]),
    path_log_probs=np.zeros(6),
    draft_rows=np.full(6, -1),
)
HISTORIES = [[*CONTEXT, *branch] for branch in ([], [5], [3], [5, 5], [5, 7], [3, 3])]


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    """Only its `_get_logits_processor` is used."""
    sizes = {"hidden_size": 4, "intermediate_size": 4, "num_hidden_layers": 1, "num_attention_heads": 1}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, **sizes))


def logits_of(seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.randn(len(TREE), VOCAB, generator=torch.Generator().manual_seed(seed)) * 2).to(dtype)


def processors_of(model: LlamaForCausalLM, **options: Any) -> LogitsProcessorList:
    """What `model.generate(**options)` would build."""
    config = GenerationConfig(do_sample="temperature" in options, eos_token_id=2, **options)
    model._prepare_special_tokens(config)
    return model._get_logits_processor(config, len(CONTEXT), torch.tensor([CONTEXT]), device="cpu")


def row_by_row(process: Callable[[Tensor, Tensor], Tensor], logits: Tensor) -> Tensor:
    """A plain call for every row, on the context and the row's own path."""
    rows = zip(HISTORIES, logits.float().clone(), strict=True)
    return torch.cat([process(torch.tensor([history]), row[None].clone()) for history, row in rows])


@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
@pytest.mark.parametrize("top_k", [0, 1, 4, 50])
@pytest.mark.parametrize("top_p", [0.05, 0.6, 0.95, 1.0])
def test_the_warpers_are_those_of_transformers(model, temperature, top_k, top_p):
    built = processors_of(model, temperature=temperature, top_k=top_k, top_p=top_p)
    sampling = Sampling(temperature, top_p, top_k)
    assert [type(warper) for warper in sampling.warpers()] == [type(warper) for warper in built]
    logits = logits_of(1)
    assert torch.equal(sampling.process(logits, TREE, CONTEXT), row_by_row(built, logits))


HISTORY_OPTIONS: list[dict[str, Any]] = [
    {"repetition_penalty": 1.8},
    {"repetition_penalty": 0.7},
    {"no_repeat_ngram_size": 2},
    {"bad_words_ids": [[5, 5], [3, 4]]},
    {"sequence_bias": [[[5, 7], 3.0], [[9], -2.0]]},
    {"min_new_tokens": 2},
    {"exponential_decay_length_penalty": (1, 1.5)},
    {"forced_eos_token_id": 2, "max_length": 6},
    {"begin_suppress_tokens": [4, 6]},
]


@pytest.mark.parametrize("options", HISTORY_OPTIONS, ids=str)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_processors_see_the_context_and_the_nodes_own_path(model, options, temperature):
    """EAGLE#178: a penalty that only the baseline applies. Here every node is judged as if it had been generated."""
    processors = tuple(processors_of(model, **options))
    row = logits_of(2)[:1]
    logits = row.expand(len(TREE), -1).contiguous()  # equal logits: what differs comes from the histories
    got = Sampling(temperature, processors=processors).process(logits, TREE, CONTEXT)
    whole = processors_of(model, **options, **({"temperature": temperature} if temperature else {}))
    assert torch.equal(got, row_by_row(whole, logits))
    assert not torch.equal(got, got[:1].expand_as(got))


def test_a_history_begins_with_the_context_and_has_the_root_once() -> None:
    seen: list[list[int]] = []

    def record(history: Tensor, scores: Tensor) -> Tensor:
        seen.append(history[0].tolist())
        return scores

    Sampling(processors=(record,)).process(logits_of(3), TREE, CONTEXT)
    assert seen == [*HISTORIES, HISTORIES[0]], "the first once more, to see whether the answer has changed"


KNOWN: list[tuple[str, dict[str, Any]]] = [
    ("TemperatureLogitsWarper", {"temperature": 0.5}),
    ("TopKLogitsWarper", {"top_k": 3}),
    ("TopPLogitsWarper", {"top_p": 0.7}),
    ("MinPLogitsWarper", {"min_p": 0.1}),
    ("TypicalLogitsWarper", {"mass": 0.6}),
    ("EpsilonLogitsWarper", {"epsilon": 0.05}),
    ("EtaLogitsWarper", {"epsilon": 0.3}),
    ("TopHLogitsWarper", {"top_h": 0.5}),
    ("InfNanRemoveLogitsProcessor", {}),
    ("LogitNormalization", {}),
    ("SuppressTokensLogitsProcessor", {"suppress_tokens": [1, 4]}),
]
# The oldest transformers that the package admits may lack some.
MEMORYLESS = [(name, options) for name, options in KNOWN if hasattr(logits_process, name)]


def test_every_processor_taken_as_memoryless_is_tried_below() -> None:
    listed = {getattr(logits_process, name) for name, _ in MEMORYLESS}
    assert set(processors_module._MEMORYLESS) == listed


@pytest.mark.parametrize(("name", "options"), MEMORYLESS, ids=[name for name, _ in MEMORYLESS])
def test_memoryless_processors_judge_all_rows_at_once(name: str, options: dict[str, Any]) -> None:
    """They get no history and all rows in one call; the result is that of a call for every row with its history."""
    processor = getattr(logits_process, name)(**options)
    logits = logits_of(4)
    logits[0, 0] = torch.inf if name == "InfNanRemoveLogitsProcessor" else logits[0, 0]
    got = Sampling(processors=(processor,)).process(logits, TREE, CONTEXT)
    assert torch.equal(got, row_by_row(processor, logits))
    assert not torch.equal(got, logits)


def test_processors_that_keep_state_are_refused(model: LlamaForCausalLM) -> None:
    """One call a node instead of one a token would corrupt their state."""
    guidance = logits_process.UnbatchedClassifierFreeGuidanceLogitsProcessor(1.5, model)
    watermark = logits_process.SynthIDTextWatermarkLogitsProcessor(2, [1, 2], 16, 0, 4, torch.device("cpu"))
    for processor in (guidance, watermark):
        with pytest.raises(ValueError, match=f"{type(processor).__name__} keeps state"):
            Sampling(processors=(processor,))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -0.5}, "temperature .* got -0.5"),
        ({"temperature": float("nan")}, "temperature .* got nan"),
        ({"top_p": 0.0}, "top_p .* got 0.0"),
        ({"top_p": 1.5}, "top_p .* got 1.5"),
        ({"top_p": float("nan")}, "top_p .* got nan"),
        ({"top_k": -2}, "top_k .* got -2"),
    ],
    ids=str,
)
def test_bad_numbers_are_named(options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Sampling(**options)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_dtypes(dtype: torch.dtype) -> None:
    """At temperature 0 nothing is copied; half precision is widened before it is divided or exponentiated."""
    logits = logits_of(5, dtype)
    assert Sampling().process(logits, TREE, CONTEXT) is logits
    assert Sampling().processed(logits, TREE, CONTEXT) is logits
    assert Sampling(top_k=1, top_p=0.1).process(logits, TREE, CONTEXT) is logits  # an argmax needs no warper
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert Sampling(1.0).process(logits, TREE, CONTEXT).dtype == wide
    warmer = Sampling(0.7).process(logits, TREE, CONTEXT)
    assert torch.equal(warmer, logits.to(wide) / 0.7)


def test_the_models_logits_are_left_alone() -> None:
    """They live in a buffer of the model; a processor may write in place."""

    def ban_nine(history: Tensor, scores: Tensor) -> Tensor:
        scores[:, 9] = -torch.inf
        return scores

    for temperature in (0.0, 1.0):
        logits = logits_of(6)
        before = logits.clone()
        scores = Sampling(temperature, processors=(ban_nine,)).process(logits, TREE, CONTEXT)
        assert torch.equal(logits, before)
        assert (scores[:, 9] == -torch.inf).all()


@pytest.mark.parametrize("policy", [OptTree(5, 0.0, 3), Static.kary(2, 2)], ids=str)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_penalty_gives_the_same_text_with_and_without_a_tree(policy: OptTree | Static, temperature: float) -> None:
    """Through the whole loop: the history of a node three deep in a later step is the text that would have been."""
    laws, banned = hashed_laws(21, VOCAB), logits_process.NoRepeatNGramLogitsProcessor(1)
    sampling = Sampling(temperature, processors=(banned,))
    drafter = TableDrafter(laws)
    with_tree = Decoder(TableTarget(laws, VOCAB), drafter, policy).generate([0], 10, sampling, seed=5)
    plain = Decoder(TableTarget(laws, VOCAB), None, Static.empty()).generate([0], 10, sampling, seed=5)
    assert with_tree.tokens == plain.tokens
    assert len({0, *plain.tokens}) == 11  # no token twice
    assert len(with_tree.steps) < len(plain.steps) or temperature


# ---- rows one by one


SETTINGS = [
    Sampling(0.7, top_p=0.8),
    Sampling(1.0),
    Sampling(1.3, top_k=4, processors=(RepetitionPenaltyLogitsProcessor(1.7),)),
    Sampling(processors=(NoRepeatNGramLogitsProcessor(2),)),
]


@pytest.mark.parametrize("sampling", SETTINGS, ids=["top-p", "bare", "penalty", "greedy"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_rows_processed_one_by_one_are_those_processed_together(sampling, dtype):
    logits = logits_of(0).to(dtype)
    together, lazy = sampling.process(logits, TREE, CONTEXT), sampling.processed(logits, TREE, CONTEXT)
    assert isinstance(lazy, LazyLogits) and lazy.shape == together.shape and len(lazy) == len(together)
    for row in (5, 0, 3, 5):
        assert torch.equal(lazy[row], together[row])
    assert torch.equal(whole(lazy), together) and torch.equal(whole(together), together)


def test_a_row_nobody_asks_for_is_never_processed(monkeypatch):
    seen = []

    def record(self, ids, scores):
        seen.append(ids[0].tolist())
        return scores

    monkeypatch.setattr(RepetitionPenaltyLogitsProcessor, "__call__", record)
    sampling = Sampling(1.0, processors=(RepetitionPenaltyLogitsProcessor(1.7),))
    lazy = sampling.processed(logits_of(0), TREE, CONTEXT)
    assert not seen
    lazy[4], lazy[4]
    assert seen == [[*CONTEXT, *TREE.tokens[TREE.path_to(4)[1:]].tolist()]]
    # One that nothing is known of is asked about all rows at once: if it keeps state, it shows it then.
    unknown = Sampling(1.0, processors=(lambda ids, scores: scores,))
    assert isinstance(unknown.processed(logits_of(0), TREE, CONTEXT), Tensor)
