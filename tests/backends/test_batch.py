"""Sequences side by side: every answer is the one that its prompt gets alone, and no lane hears of another."""

import copy
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from side_by_side import METHODS, OPT, PLACES, PROMPTS, TREES, compare, decoder_of, trace
from table_models import TableDrafter, TableTarget, hashed_laws
from tiny_models import VOCAB, prompt, tiny, tiny_drafter

from opt_tree import generate_batch, side_by_side
from opt_tree.backends.batch import shared_forwards as batch
from opt_tree.backends.batch.kv_lanes import Storage
from opt_tree.backends.batch.merge_tensors import cheapest_split
from opt_tree.backends.cuda_graphs import Captured
from opt_tree.cache import KVCache, LayerShape
from opt_tree.decoder import Decoder
from opt_tree.draft_model import CausalLMDrafter
from opt_tree.methods.controllers.scheduled import Scheduled
from opt_tree.methods.policies.static import Static
from opt_tree.methods.sampling import Sampling
from opt_tree.models.causal_lm import CausalLM
from opt_tree.policy import OptTree
from opt_tree.tools.stop_strings import Stop

NEW = 8


@pytest.mark.quick("plain-opt", "draft-opt", "draft-traversal")
@pytest.mark.parametrize("number", range(len(METHODS)), ids=["-".join(method) for method in METHODS])
def test_every_answer_is_its_prompt_s_own(number):
    """With two lanes, prompts begin in lanes that others left."""
    (drafter, tree), (architecture, buckets) = METHODS[number], PLACES[number % len(PLACES)]
    decoder = decoder_of(drafter, tree, architecture, buckets)
    compare(decoder, TREES[tree][2], PROMPTS[:4], (2 if number % 2 else 4,), NEW)


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return decoder_of("draft")


@pytest.fixture(scope="module")
def alone(decoder) -> list[tuple]:
    return trace([decoder.generate(ids, NEW) for ids in PROMPTS])


def test_a_target_without_a_model_is_copied_for_each_lane():
    laws = hashed_laws(0, 5)
    decoder = Decoder(TableTarget(laws, 5), TableDrafter(laws), OPT)
    compare(decoder, Sampling(), [[1], [2, 3], [4, 0, 1]], (2,), NEW)


def test_a_controller_has_a_state_for_each_lane(decoder):
    schedule = Scheduled([OptTree(4, 0.1), Static.empty(), Static.chain(2)])
    compare(Decoder(decoder.target, decoder.drafter, schedule), Sampling(), PROMPTS[:3], (3,), NEW)


def test_stop_rules_and_seeds_are_each_prompt_s_own(decoder):
    sampling, rules = Sampling(0.9), [None, Stop({7}), lambda tokens: "even" if tokens[-1] % 2 == 0 else None]
    alone = [
        decoder.generate(ids, NEW, sampling, rule, seed=seed)
        for ids, rule, seed in zip(PROMPTS[:3], rules, (5, 6, 7), strict=True)
    ]
    many = generate_batch(decoder, PROMPTS[:3], NEW, sampling, rules, [5, 6, 7], width=3)
    assert trace(many) == trace(alone) and {answer.lanes for answer in many} == {3}


def test_forwards_are_packed_and_lanes_are_filled_again(decoder, alone, monkeypatch):
    sizes: dict[bool, list[int]] = {True: [], False: []}
    run = batch.SharedModel.run

    def counted(self: batch.SharedModel, asked: list[batch.Ask]) -> Any:
        sizes[self.last].append(len(asked))
        return run(self, asked)

    monkeypatch.setattr(batch.SharedModel, "run", counted)
    assert trace(generate_batch(decoder, PROMPTS, NEW, width=3)) == alone
    # Each target forward of a sequence is in a pack; the packs are hardly ever of one.
    steps = sum(len(one[3]) for one in alone)
    assert sum(sizes[True]) == steps + sum(len(ids) > 1 for ids in PROMPTS)
    assert sum(sizes[True]) / len(sizes[True]) > 1.8 and max(sizes[False]) == 3


def test_a_prefill_computes_the_logits_of_its_last_row_only():
    """Of every lane's, though prompts differ in length."""
    seen: list[torch.Size] = []
    decoder = decoder_of("plain")
    head = decoder.target.model.get_output_embeddings()
    handle = head.register_forward_hook(lambda module, inputs, output: seen.append(output.shape))
    try:
        generate_batch(decoder, [prompt(20), prompt(17, seed=1)], 1, width=2)
    finally:
        handle.remove()
    assert [shape[:2] for shape in seen] == [(2, 1), (2, 1)]


def test_forwards_are_split_where_that_is_cheapest():
    for rows, call in itertools.product(
        [(12, 10, 9), (500, 12, 10, 9), (1, 1, 1), (40, 31, 20, 1), (7,)], (1, 12, 200)
    ):

        def cost(part: Sequence[int], call: int = call) -> int:
            return call + len(part) * max(part)

        parts = cheapest_split(rows, cost)
        assert sorted((size for part in parts for size in part), reverse=True) == list(rows)
        every = itertools.product(range(len(rows)), repeat=len(rows))  # each forward in any part
        splits = [[[rows[i] for i, own in enumerate(parts) if own == part] for part in {*parts}] for parts in every]
        assert sum(map(cost, parts)) == min(sum(map(cost, split)) for split in splits)
    assert cheapest_split([500, 10, 9], lambda part: 12 + len(part) * max(part)) == [[10, 9], [500]]


@pytest.mark.slow
def test_an_error_in_one_ends_all_and_says_which(decoder, alone):
    def rule(tokens: list[int]) -> None:
        if len(tokens) > 3:
            raise RuntimeError("no more paper")

    before = decoder.target.length
    with pytest.raises(RuntimeError, match="no more paper") as error:
        generate_batch(decoder, PROMPTS, NEW, width=3, stop=[None, None, rule, None, None, None, None])
    assert "sequence 2 of" in error.value.__notes__[0]
    assert not torch.is_inference_mode_enabled() and decoder.target.length == before
    assert trace(generate_batch(decoder, PROMPTS, NEW, width=3)) == alone


def test_closing_early_ends_every_lane(decoder):
    begun: list[int] = []
    ended: list[bool] = []

    def job(own: Decoder) -> Iterator[Any]:
        begun.append(0)
        try:
            return (yield from own.answer(PROMPTS[1], 1 if len(begun) == 1 else 200)).tokens
        finally:
            ended.append(torch.is_inference_mode_enabled())

    running = side_by_side(decoder, [job] * 5, 3)
    assert next(running)[0] == 0
    assert len(begun) == 3 and len(ended) == 1 and not torch.is_inference_mode_enabled()
    running.close()
    assert len(begun) == 3 and ended == [True] * 3 and not torch.is_inference_mode_enabled()


def in_thread(call: Callable[[], Any]) -> list[Any]:
    """What another thread finds, an error included; nothing of one that hangs."""
    found: list[Any] = []

    def work() -> None:
        try:
            found.append(call())
        except RuntimeError as error:
            found.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(300)
    return found


@pytest.mark.slow
def test_another_thread_decodes_between_two_results(alone):
    """Whether or not there was a generation before the batch: its lanes have turns of their own."""
    for used in (False, True):
        decoder = decoder_of("draft")
        if used:
            decoder.generate(PROMPTS[0], NEW)
        running = side_by_side(decoder, [lambda own, ids=ids: own.answer(ids, NEW) for ids in PROMPTS], 3)
        first = next(running)
        [between] = in_thread(lambda decoder=decoder: decoder.generate(PROMPTS[0], NEW))
        assert trace([between]) == alone[:1]
        found = dict([first, *running])
        assert trace([found[place] for place in range(len(PROMPTS))]) == alone


@pytest.mark.slow
def test_a_batch_and_a_text_at_once_take_turns(alone):
    """Else the one thread runs the model in the middle of the other's forward."""
    decoder = decoder_of("draft")
    inside, most, begun = [0], [0], threading.Event()

    def enter(*_: object) -> None:
        inside.append(1)
        most.append(sum(inside))
        if not begun.is_set():  # the batch's first forward lasts until the other thread would be in one
            begun.set()
            time.sleep(0.2)

    for lm in (decoder.target, *decoder.drafter.models):
        lm.model = copy.deepcopy(lm.model)
        lm.eager.network = lm.model
        lm.model.register_forward_pre_hook(enter)
        lm.model.register_forward_hook(lambda *_: inside.append(-1))
    batches: list[Any] = []
    thread = threading.Thread(target=lambda: batches.append(trace(generate_batch(decoder, PROMPTS, NEW, width=3))))
    thread.start()
    begun.wait()
    single = [trace([decoder.generate(PROMPTS[0], NEW)]) for _ in range(5)]
    thread.join()
    assert batches == [alone] and single == [alone[:1]] * 5 and max(most) == 1


@pytest.mark.slow
def test_any_thread_may_go_on_with_a_batch_and_end_it(decoder, alone):
    """A text is a generator: it belongs to nobody."""
    ended: list[bool] = []

    def job(own: Decoder, new: int) -> Iterator[Any]:
        try:
            return (yield from own.answer(PROMPTS[1], new)).tokens
        finally:
            ended.append(torch.is_inference_mode_enabled())

    running = side_by_side(decoder, [lambda own, new=new: job(own, new) for new in (1, 200, 200, 1)], 3)
    next(running)
    [(place, _)] = in_thread(lambda: next(running))
    assert place == 3 and in_thread(running.close) == [None]
    assert ended == [True] * 4 and not torch.is_inference_mode_enabled()
    assert trace(generate_batch(decoder, PROMPTS, NEW, width=3)) == alone


def test_the_decoder_itself_is_left_as_it_was(decoder, alone):
    """It may be in the middle of a text of its own."""
    own = decoder.steps(PROMPTS[0], NEW)
    tokens = list(next(own).tokens)
    generate_batch(decoder, PROMPTS[:3], NEW, width=2)
    assert [*tokens, *(token for step in own for token in step.tokens)][:NEW] == alone[0][0]


def test_a_job_s_decoder_is_of_no_use_after_it(decoder, alone):
    """Nobody computes the forwards that it asks for."""
    kept = []
    jobs = [lambda own: kept.append(own) or own.answer(PROMPTS[0], NEW)] * 2
    assert [found.tokens for _, found in side_by_side(decoder, jobs, 2)] == [alone[0][0]] * 2
    with pytest.raises(RuntimeError, match="belongs to a job of side_by_side, whose forwards are yielded"):
        kept[0].generate(PROMPTS[0], NEW)


def test_what_cannot_be_packed_is_decoded_one_by_one(decoder, alone, monkeypatch):
    monkeypatch.setattr(decoder.target, "backend", Captured(decoder.target.eager, (8,)))
    with pytest.warns(UserWarning, match="one sequence after the other: .* replays captured graphs"):
        many = generate_batch(decoder, PROMPTS[:2], NEW, width=2)
    assert trace(many) == alone[:2] and {answer.lanes for answer in many} == {1}


def test_a_drafter_that_runs_more_than_it_names_is_not_copied(alone):
    """Its rows would lie in another cache than its lane's."""

    class Secret(CausalLMDrafter):
        def __init__(self, target: CausalLM) -> None:
            super().__init__(CausalLM(tiny_drafter("llama")), VOCAB)
            self.rows = KVCache(target.cache.shapes)

    target = CausalLM(tiny("llama"))
    with pytest.warns(UserWarning, match="one sequence after the other: the drafter has a .* beside the models"):
        many = generate_batch(Decoder(target, Secret(target), OPT), PROMPTS[:2], NEW, width=2)
    assert [answer.tokens for answer in many] == [one[0] for one in alone[:2]]


def test_bad_input_is_refused_before_anything_is_decoded(decoder):
    work = decoder.target.work
    for refused, match in (
        (lambda: generate_batch(decoder, [[1], [2, 99]]), "prompt 1 of the batch: token 99"),
        (lambda: generate_batch(decoder, [[1], []]), "prompt 1 of the batch: the prompt is empty"),
        (lambda: generate_batch(decoder, [[1], [2]], seed=[1]), "2 prompts, but 2 stop rules and 1 seed"),
        (lambda: generate_batch(decoder, [[1], [2]], 4, stop=[None, "end"], width=1), "stop must be a rule.*'end'"),
        (lambda: generate_batch(decoder, [[1], [2]], width=0), "width must be at least 1"),
        (lambda: generate_batch(decoder, [[1], [2]], 0), "max_new_tokens must be at least 1"),
    ):
        with pytest.raises((TypeError, ValueError), match=match):
            refused()
    assert decoder.target.work == work and generate_batch(decoder, []) == []


def test_there_are_as_many_lanes_as_prompts(decoder, alone, monkeypatch):
    """A width of 20,000 took 2.5 GB for two prompts."""
    made, lane_memos = [], batch.lane_memos
    monkeypatch.setattr(batch, "lane_memos", lambda models, width: made.append(width) or lane_memos(models, width))
    assert trace(generate_batch(decoder, PROMPTS[:2], NEW, width=20_000)) == alone[:2]
    assert trace(generate_batch(decoder, PROMPTS[:1], NEW, width=20_000)) == alone[:1]
    assert made == [2]


@torch.inference_mode()
def test_rows_of_a_storage_are_moved_before_they_are_needed():
    """Commits of two lanes, one of them overlapping itself; the storage grows before the next forward."""
    storage = Storage([LayerShape(1, 2, 3, torch.float64, torch.device("cpu"))], 2)
    for lane, kept in zip(storage.lanes, ([1, 2, 4], [0, 3]), strict=True):
        lane.open(5)
        storage.open([lane.number], 5, torch.arange(5)[None])
        rows = torch.arange(5.0, dtype=torch.float64)[None, None, :, None] + 10 * lane.number
        keys, _ = storage.update(rows.expand(1, 1, 5, 2), rows.expand(1, 1, 5, 3), 0)
        assert keys[0, 0, :, 0].tolist() == rows.flatten().tolist()
        lane.commit(kept)
    storage.reserve(1000)
    assert [lane.capacity for lane in storage.lanes] == [storage.slots - 1] * 2
    storage.open([0, 1], 3, torch.full((2, 1), storage.slots - 1))
    keys, values = storage.update(*(torch.full((2, 1, 1, dim), 99.0, dtype=torch.float64) for dim in (2, 3)), 0)
    assert keys[0, 0, :, 0].tolist() == [1, 2, 4] and values[1, 0, :2, 0].tolist() == [10, 13]
    with pytest.raises(ValueError, match="cannot keep rows"):
        storage.lanes[0].commit([0])
