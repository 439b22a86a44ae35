"""The loop as a user drives it: what is streamed, who may interleave, what a controller is shown, what a step cost."""

import copy
import dataclasses
import inspect
import itertools
import pickle
import threading
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from networks import NEW, PROMPTS, VOCAB, drafter_of, logits_after, network, written

from opt_tree.backend import Backend, cache_argument
from opt_tree.children import TopK
from opt_tree.decode import Run, grow, prefill
from opt_tree.decoder import Decoder
from opt_tree.draft_model import CausalLMDrafter, OfModel
from opt_tree.model import Model
from opt_tree.policy import OptTree, TreePolicy
from opt_tree.pool import CandidatePool
from opt_tree.request import StopTokens
from opt_tree.sampling import Random, Temperature
from opt_tree.target import Forward, Output, run_alone
from opt_tree.tree import Tree
from opt_tree.verify import greedy

PROMPT, POLICY = PROMPTS[1], OptTree(8, 0.0, 4)


@pytest.fixture(scope="module")
def target() -> Any:
    return network("llama")


def decoder_of(target: Any, policy: TreePolicy = POLICY, **others: Any) -> Decoder:
    return Decoder(Model(target), drafter_of(target), policy, **others)


# ---- what goes in and comes out


class Streamer:
    def __init__(self) -> None:
        self.got: list[list[int]] = []
        self.ended = 0

    def put(self, tokens: torch.Tensor) -> None:
        self.got.append(tokens.tolist())

    def end(self) -> None:
        self.ended += 1


def test_a_streamer_gets_the_prompt_then_the_tokens_of_each_step(target: Any) -> None:
    streamer, decoder = Streamer(), decoder_of(target)
    found = decoder.generate(PROMPT, NEW, stop=None, streamer=streamer)
    assert streamer.got[0] == [PROMPT] and streamer.ended == 1
    assert [len(part) for part in streamer.got[1:]] == found.accept_lengths
    assert [token for part in streamer.got[1:] for token in part] == found.tokens
    with pytest.raises(ValueError, match="the prompt is empty"):
        decoder.generate([], NEW, streamer=streamer)
    assert streamer.ended == 2, "who reads in another thread would wait for ever"
    with pytest.raises(TypeError, match="streamer must be one of transformers', with put and end, got 5"):
        decoder.generate(PROMPT, streamer=5)


@pytest.mark.parametrize("form", [tuple, np.array, torch.tensor, lambda ids: torch.tensor([ids]), lambda ids: [ids]])
def test_a_prompt_may_have_many_forms(target: Any, form: Any) -> None:
    found = decoder_of(target).generate(form(PROMPT), 3.0, stop=None)
    assert found.prompt == PROMPT and found.tokens == written(target, PROMPT, 3)
    assert {type(token) for token in found.prompt} == {int}


def test_a_target_s_own_end_tokens_stop_it_unless_told_otherwise(target: Any) -> None:
    expected, model = written(target, PROMPT), Model(target)
    end = expected.index(expected[6]) + 1
    model.ends = frozenset({expected[6]})
    decoder = Decoder(model, drafter_of(target), POLICY)
    assert decoder.generate(PROMPT, NEW).tokens == expected[:end]
    tokens = [token for step in decoder.steps(PROMPT, NEW) for token in step.tokens]
    assert tokens[:end] == expected[:end] and len(tokens) < NEW
    assert decoder.generate(PROMPT, NEW, stop=None).tokens == expected


def test_a_rule_sees_the_text_so_far_token_by_token(target: Any) -> None:
    seen: list[list[int]] = []

    def rule(generated: list[int]) -> str | None:
        seen.append(generated[:])
        return "enough" if len(generated) == 5 else None

    found = decoder_of(target).generate(PROMPT, NEW, stop=rule)
    expected = written(target, PROMPT)[:5]
    assert found.finish_reason == "enough" and seen == [expected[:end] for end in range(1, 6)]


def test_a_finished_answer_has_its_figures(target: Any) -> None:
    found = decoder_of(target).generate(PROMPT, NEW, stop=None)
    lengths = [len(step.tokens) for step in found.steps]
    assert found.mean_acceptance_length == pytest.approx(NEW / len(lengths))
    assert [step.accepted + 1 for step in found.steps] == lengths
    assert [step.expected_accepted for step in found.steps] == [step.tree.expected_accepted for step in found.steps]
    assert found.expected_lengths == [step.expected_accepted + 1 for step in found.steps]
    assert found.tokens_per_second == pytest.approx(NEW / found.seconds)
    assert found.lanes == 1 and found.reused == 0 and found.log_probs is found.top_log_probs is None
    plain = Decoder(Model(target), None, Plain()).generate(PROMPT, 4, stop=None)
    assert plain.mean_acceptance_length == 1 and plain.tokens == written(target, PROMPT, 4)
    assert [(step.draft_forwards, step.draft_tokens, step.accepted) for step in plain.steps] == [(0, 0, 0)] * 4
    none = dataclasses.replace(plain, steps=[], accept_lengths=[])
    assert none.mean_acceptance_length == none.prefill_seconds == 0


def test_times_add_up(target: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that goes on by one whenever it is read: so a forward, between two readings, takes one."""
    ticks = itertools.count()
    decoder = decoder_of(target)
    monkeypatch.setattr("time.perf_counter", lambda: next(ticks))
    found = decoder.generate(PROMPT, NEW, stop=None)
    spent = found.prefill_seconds
    assert spent == found.steps[0].times.prefill == 3, "a forward, the beginning and the end"
    for number, step in enumerate(found.steps):
        times = step.times
        assert times.draft_forward == step.draft_forwards and times.target_forward == 1
        assert (times.draft, times.verify, times.commit) == (2 * step.draft_forwards + 1, 3, 1)
        assert times.total == times.draft + times.verify + times.commit
        assert times.other == times.total - times.draft_forward - times.target_forward
        assert number == 0 or times.prefill == 0
        spent += times.total
    assert found.seconds == spent + 2 + len(found.steps), "and a reading between two parts"


def test_a_step_says_what_was_run_for_it(target: Any) -> None:
    """The drafter catches up with the prompt, then with what it had not run; the target runs the tree alone."""
    decoder, length = decoder_of(target), 0
    drafter, whole = decoder.drafter.lm, decoder.target
    for number, step in enumerate(decoder.steps(PROMPT, NEW, stop=None)):
        expanded = int(step.tree.draft_rows.max())
        layers = int(step.tree.depths[step.tree.draft_rows >= 0].max()) + 1
        assert step.draft_forwards >= layers and step.policy is POLICY
        assert step.draft_tokens >= expanded + (len(PROMPT) if number == 0 else 1)
        length += len(step.tokens)
        assert whole.length == len(PROMPT) - 1 + length and whole.cache.pending == 0
        assert len(PROMPT) + length - 2 <= drafter.length + 1 and drafter.length <= len(PROMPT) + length - 1
    assert whole.work.forwards == number + 2


class Plain(TreePolicy):
    max_depth, children = 0, TopK(per_node=1)


class Chain(TreePolicy):
    """One token a layer, as deep as may be."""

    max_depth, children = 9, TopK(per_node=1)

    def expand(self, pool: CandidatePool) -> np.ndarray:
        return pool.newest

    def select(self, pool: CandidatePool) -> np.ndarray:
        return np.arange(pool.size)


# ---- who may interleave


def test_a_second_generation_ends_the_first(target: Any) -> None:
    for shared in ("target", "drafter"):
        decoder = decoder_of(target)
        other = Decoder(
            decoder.target if shared == "target" else Model(target),
            drafter_of(target) if shared == "target" else decoder.drafter,
            POLICY,
        )
        first = decoder.steps(PROMPT, NEW, stop=None)
        next(first)
        assert other.generate(PROMPT, 4, stop=None).tokens == written(target, PROMPT, 4)
        wanted = {"target": "on the same target; wrap the model twice", "drafter": "with the same drafter; make two"}
        with pytest.raises(RuntimeError, match=f"another generation began {wanted[shared]}"):
            next(first)
        first = decoder.steps(PROMPT, NEW, stop=None)
        next(first)
        assert other.generate(PROMPT, 4, stop=None, reuse=True).tokens == written(target, PROMPT, 4)
        with pytest.raises(RuntimeError, match="another generation began"):
            next(first)
        assert other.generate(PROMPT, 4, stop=None).tokens == written(target, PROMPT, 4)


def test_threads_take_turns(target: Any) -> None:
    decoder = decoder_of(target)
    texts: list[list[int] | None] = [None] * 3

    def generate(place: int) -> None:
        texts[place] = decoder.generate(PROMPTS[place], NEW, stop=None).tokens

    threads = [threading.Thread(target=generate, args=(place,)) for place in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == [written(target, prompt) for prompt in PROMPTS]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))], ids=["copy", "pickle"])
def test_a_copy_goes_on_by_itself(target: Any, copied: Any) -> None:
    decoder = decoder_of(target)
    decoder.generate(PROMPT, 6, stop=None)
    other = copied(decoder)
    prompt = [*PROMPT, *written(target, PROMPT, 6)]
    decoder.generate(PROMPTS[2], 4, stop=None)
    found = other.generate([*prompt, 3], 5, stop=None, reuse=True)
    assert found.tokens == written(target, [*prompt, 3], 5) and found.reused > len(PROMPT)


def test_a_text_may_be_decoded_step_by_step(target: Any) -> None:
    decoder = decoder_of(target)
    decoder.generate(PROMPT, 4, stop=None)
    run = Run(decoder.target, decoder.drafter, greedy, Temperature(), Random(), [*PROMPT], decoder.target.max_context)
    run_alone(prefill(run, decoder.policy))
    assert run.kept == 0 and decoder.target.length == len(PROMPT) - 1
    with torch.inference_mode():
        while len(run.context) < len(PROMPT) + 9:
            run_alone(decoder.step(run))
    assert run.context == [*PROMPT, *written(target, PROMPT)][: len(run.context)]


def test_a_job_beside_others_is_asked_for_like_one_alone(target: Any) -> None:
    alone, beside = (inspect.signature(way).parameters for way in (Decoder.generate, Decoder.answer))
    assert alone == beside, "names, order, defaults"
    told = {name: one.default for name, one in alone.items() if one.default is not one.empty}
    assert told == {"max_new_tokens": 128, "sampling": Temperature(), "stop": StopTokens(), "seed": 0} | {
        "streamer": None, "reuse": False, "recorder": None,
    }  # fmt: skip
    decoder = decoder_of(target)
    with torch.inference_mode():
        found = run_alone(decoder.answer(PROMPT, NEW, Temperature(0.9), None, seed=3))
    assert found.tokens == decoder.generate(PROMPT, NEW, Temperature(0.9), None, seed=3).tokens


def test_a_model_of_several_processes_is_led(target: Any) -> None:
    """`generate` has the one that leads act; whoever takes the steps himself is told if he does not lead."""
    told: list[Any] = []

    class Ranks:
        def led(self, models: Any, action: Any) -> Any:
            told.append(models)
            return action()

        def check_led(self, name: str) -> None:
            told.append(name)

    decoder = decoder_of(target)
    decoder.target.ranks = Ranks()
    assert decoder.generate(PROMPT, 4, stop=None).tokens == written(target, PROMPT, 4)
    assert told == [decoder.models, decoder.target.name] and decoder.models == (decoder.target, decoder.drafter.lm)
    next(decoder.steps(PROMPT, 4))
    assert told[2:] == [decoder.target.name]


# ---- what is kept of the last text


@pytest.mark.parametrize("shorter", [0, 3, 7])
def test_what_a_prompt_shares_with_the_last_text_is_kept(target: Any, shorter: int) -> None:
    """Less one token at least, which the target runs for whoever reads what it says of the last."""
    decoder, first = decoder_of(target), written(target, PROMPT, 9)
    decoder.generate(PROMPT, 9, stop=None)
    text = [*PROMPT, *first]
    prompt = text[: len(text) - shorter]
    held = decoder.target.length
    again = decoder.generate(prompt, 5, stop=None, reuse=True)
    assert again.tokens == written(target, prompt, 5) and again.reused == min(held, len(prompt) - 2)
    changed = [*prompt[:4], (prompt[4] + 1) % VOCAB, *prompt[5:]]
    other = decoder.generate(changed, 5, stop=None, reuse=True)
    assert other.tokens == written(target, changed, 5) and other.reused == 4
    assert decoder.generate(changed, 5, stop=None).reused == 0


def test_a_model_keeps_what_it_may(target: Any) -> None:
    model = Model(target)
    model.append(PROMPT)
    assert model.keep([*PROMPT[:5], 20], 9) == 5 == model.length and model.generation == 1
    assert model.keep(PROMPT, 3) == 3 == model.length and model.generation == 2
    assert model.append(PROMPT[3:]).logits[-1].tolist() == pytest.approx(logits_after(target, PROMPT).tolist())
    assert model.keep([PROMPT[0], 20], 9) == 1 == model.length
    assert model.keep(PROMPT, 0) == 0 == model.length and model.generation == 4
    model.append(PROMPT)
    assert model.keep([20, *PROMPT], 9) == 0 == model.length
    model.append(PROMPT)
    model.cache.can_cut = lambda length: False
    assert model.keep(PROMPT, 9) == 0 == model.length
    del model.cache.can_cut
    model.append(PROMPT)
    model.backend.begin_text = lambda: False  # another network by now
    assert model.keep(PROMPT, 9) == 0 == model.length


# ---- how a text is run


class Parts(Backend):
    rows_at_once = 3


class Padded(Parts):
    def shape(self, rows: int, first_slot: int) -> tuple[int, int]:
        return rows + 2, first_slot + rows + 5


@pytest.mark.parametrize("backend", [Parts, Padded])
def test_a_text_and_a_tree_in_parts_have_the_logits_of_the_whole(target: Any, backend: Any) -> None:
    model, text = Model(target, backend(target)), list(range(1, 12))
    expected = torch.stack([logits_after(target, text[: end + 1]) for end in range(len(text))])
    torch.testing.assert_close(model.append(text, all_logits=True).logits, expected, rtol=0, atol=1e-10)
    model.reset()
    torch.testing.assert_close(model.append(text).logits, expected[-1:], rtol=0, atol=1e-10)
    tree = Tree.of([5, 4, 8, 4, 2, 11, 2], [-1, 0, 0, 1, 1, 2, 3])
    found = model.score(tree).logits
    for row in range(len(tree)):
        law = logits_after(target, [*text, *tree.tokens[tree.path_to(row)].tolist()])
        torch.testing.assert_close(found[row], law, rtol=0, atol=1e-10)
    work = model.work
    assert (work.forwards, work.tokens) == (4 + 4 + 3, 11 + 11 + 7)
    nothing = Forward(model, np.zeros(0, int), np.zeros(0, int), np.zeros((0, 0), bool))
    assert model.run(nothing).logits.shape == (0, VOCAB)
    with pytest.raises(ValueError, match="nothing to append"):
        model.append([])


def test_a_long_prompt_is_taken_in_by_parts(target: Any) -> None:
    model = Model(target)
    text = np.random.default_rng(0).integers(0, VOCAB, 1100).tolist()
    found = model.append(text).logits
    torch.testing.assert_close(found[-1], logits_after(target, text), rtol=0, atol=1e-9)
    assert (model.work.forwards, model.work.tokens, model.length) == (3, 1100, 1100)


class WithStates(Backend):
    """Returns the embeddings of the rows as layer 0's states, as a backend with hidden states would."""

    def watch(self, layers: tuple[int, ...]) -> None:
        self.layers = layers

    def forward(self, inputs: Any, cache: Any) -> Output:
        states = self.network.get_input_embeddings()(inputs.numbers[0])
        return super().forward(inputs, cache)._replace(features=dict.fromkeys(self.layers, states))


class StatesAtOnce(WithStates):
    rows_at_once = 4

    def shape(self, rows: int, first_slot: int) -> tuple[int, int]:
        return rows + 2, first_slot + rows + 2


class Watching(OptTree):
    """Learns from a text: keeps what it was shown."""

    features = (3, 0)

    def begin(self, prompt: list[int], prefill: Output | None) -> None:
        self.__dict__["seen"] = [] if prefill is None else [(prompt[:-1], prefill.features)]

    def observe(self, step: Any, outcome: Any) -> None:
        assert step.tokens == outcome.tokens and step.path == outcome.path
        self.seen.append((outcome.tree.tokens[outcome.path].tolist(), outcome.features))


@pytest.mark.parametrize("backend", [WithStates, StatesAtOnce])
def test_a_policy_is_shown_the_hidden_states_that_it_watches(target: Any, backend: Any) -> None:
    """Of every token of the prompt but the last, then of the accepted rows of each step."""
    policy, model = Watching(8, 0.0, 4), Model(target, backend(target))
    found = Decoder(model, drafter_of(target), policy).generate(PROMPT, NEW, stop=None)
    assert model.backend.layers == (0, 3) and found.tokens == written(target, PROMPT)
    text: list[int] = []
    for tokens, features in policy.seen:
        text += tokens
        for layer in (0, 3):
            expected = target.get_input_embeddings()(torch.tensor(tokens))
            assert torch.equal(features[layer], expected)
    assert text == [*PROMPT, *found.tokens][: len(text)] and len(text) >= len(PROMPT) + NEW - 1


class Head(torch.nn.Module):
    """A network that is given a row of features beside each token."""

    def __init__(self, network: Any) -> None:
        super().__init__()
        self.network, self.config = network, network.config

    def get_input_embeddings(self) -> torch.nn.Module:
        return self.network.get_input_embeddings()

    def forward(self, input_ids, position_ids, attention_mask=None, cache=None, use_cache=None, *, features):
        rows, kept = self.get_input_embeddings()(input_ids) + features, {cache_argument(type(self.network)): cache}
        given = {"position_ids": position_ids, "attention_mask": attention_mask, "use_cache": use_cache}
        return self.network(inputs_embeds=rows, **given, **kept)


@pytest.mark.parametrize("backend", [Backend, Parts, Padded])
def test_a_head_is_given_the_features_of_each_row(target: Any, backend: Any) -> None:
    head, text = Head(target), list(range(1, 8))
    features = torch.randn(7, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    embedded = target.get_input_embeddings()(torch.tensor([text])) + features
    expected = target(inputs_embeds=embedded, use_cache=False).logits[0]
    model = Model(head, backend(head))
    found = model.run(model.text(text, features, all_logits=True)).logits
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


# ---- controllers


class Alternating(TreePolicy):
    """Chooses another policy for each step, by the drafter's scores of the next token."""

    reads_root = True

    def __init__(self, *known: TreePolicy) -> None:
        self.known, self.shown = known, list[tuple[list[int], Any]]()

    @property
    def policies(self) -> tuple[TreePolicy, ...]:
        return self.known[:3]

    def choose(self, context: list[int], root: Any) -> TreePolicy:
        self.shown.append((list(context), None if root is None else root.values.clone()))
        return self.known[len(self.shown) % len(self.known)]


def test_a_controller_chooses_for_each_step_and_is_shown_the_root(target: Any) -> None:
    known = (OptTree(8, 0.0, 4), OptTree(2, 0.0, 2), Plain())
    controller = Alternating(*known)
    decoder = decoder_of(target, controller)
    found = decoder.generate(PROMPT, NEW, stop=None)
    assert found.tokens == written(target, PROMPT)
    for number, (step, (context, root)) in enumerate(zip(found.steps, controller.shown, strict=True), start=1):
        assert step.policy is known[number % 3] and step.tree.tokens[0] == context[-1]
        if len(context) < len(PROMPT) + NEW - 1:
            expected = logits_after(decoder.drafter.lm.model, context).log_softmax(-1)
            torch.testing.assert_close(root[0], expected, rtol=0, atol=1e-9)
        else:
            assert root is None, "there is no room to draft"
    astray = decoder_of(target, Alternating(*known, OptTree(3)))
    with pytest.raises(ValueError, match="Alternating chose a policy that is not one of its own"):
        astray.generate(PROMPT, NEW, stop=None)


def test_a_tree_s_layers_end_with_the_text(target: Any) -> None:
    """No layer is drafted whose tokens nobody would keep, nor beyond what the drafter has room for."""
    decoder, left = decoder_of(target, Chain()), 6
    for step in decoder.generate(PROMPT, 6, stop=None).steps:
        assert step.tree.depths.max() == left - 1
        left -= len(step.tokens)
    assert left == 0
    for layers in (0, 2):
        asked: list[int] = []
        decoder.drafter.room = lambda length, layers=layers, asked=asked: asked.append(length) or layers
        first = next(decoder.steps(PROMPT, NEW, stop=None))
        assert first.tree.depths.max() == layers and set(asked) == {len(PROMPT)}
    del decoder.drafter.room
    decoder.drafter.max_context = len(PROMPT) + 1
    with pytest.warns(UserWarning, match="has positions for 8 tokens of context .* behind the former nothing") as told:
        found = decoder.generate(PROMPT, NEW, stop=None)
        assert decoder.generate(PROMPT, NEW, stop=None).tokens == found.tokens == written(target, PROMPT)
    assert len(told) == 1, "once"
    assert [step.tree.depths.max() for step in found.steps] == [1, *[0] * (len(found.steps) - 1)]


@pytest.mark.parametrize(("most", "warned"), [(256 - 65, True), (256 - 64, True), (256 - 63, False)])
def test_a_drafter_that_ends_near_the_target_s_end_is_no_word_worth(target: Any, most: int, warned: bool) -> None:
    decoder = decoder_of(target)
    decoder.drafter.max_context = most
    prompt = [1, 2] * (most // 2) + [3] * (most % 2)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        first = next(decoder.steps(prompt, NEW, stop=None))
    assert [str(one.message).endswith("nothing is drafted") for one in told] == [True] * warned and not first.tree.nodes


def test_a_step_does_not_keep_what_children_were_drawn_from(target: Any) -> None:
    class Keeping(CandidatePool):
        def tree(self, rows: np.ndarray) -> Tree:
            return dataclasses.replace(super().tree(rows), draft_log_probs=torch.zeros(1, VOCAB))

    class Kept(TopK):
        def pool(self, root: int, sampling: Any, random: Any) -> CandidatePool:
            return Keeping(root, self)

    class Keeps(OptTree):
        children = Kept(total=8)

        def observe(self, step: Any, outcome: Any) -> None:
            assert outcome.tree.draft_log_probs is not None and step.tree.draft_log_probs is None

    assert decoder_of(target, Keeps(8)).generate(PROMPT, 4, stop=None).tokens == written(target, PROMPT, 4)


# ---- draws that cannot be made


@pytest.mark.parametrize("temperature", [0, 0.8])
def test_what_is_no_number_is_said_at_once(target: Any, temperature: float) -> None:
    broken = copy.deepcopy(target)
    broken.model.norm.weight.data[3] = torch.nan
    decoder = Decoder(Model(broken), drafter_of(target), POLICY)
    with pytest.raises(ValueError, match=r"no token can be drawn at row 0 of a tree of 9: the model's logits are not"):
        decoder.generate(PROMPT, NEW, Temperature(temperature), stop=None)


class Forbidden(Temperature):
    def warp(self, logits: torch.Tensor) -> torch.Tensor:
        return torch.full_like(logits, -torch.inf)


def test_a_row_without_an_allowed_token_is_said_where_it_is_drawn_from(target: Any) -> None:
    def refusing(tree: Tree, logits: Any, random: Random) -> Any:
        return greedy(tree, logits, random)

    for name in ("valid_for", "refuses", "lossy", "greedy_only"):
        setattr(refusing, name, getattr(greedy, name))
    refusing.greedy_only = False
    with pytest.raises(ValueError, match="no token can be drawn at row 0 of a tree of 9: its probability is 0"):
        Decoder(Model(target), drafter_of(target), POLICY, refusing).generate(PROMPT, NEW, Forbidden(0.5), stop=None)


# ---- drafters of other vocabularies


def resized(vocab: int) -> Model:
    model = copy.deepcopy(network("llama"))
    torch.manual_seed(2)
    if vocab < VOCAB:
        model.resize_token_embeddings(vocab)
    else:
        model.resize_token_embeddings(vocab, mean_resizing=False)
    return Model(model.double().eval())


@pytest.mark.parametrize("vocab", [VOCAB - 8, VOCAB + 8])
def test_a_draft_model_may_know_other_tokens(target: Any, vocab: int) -> None:
    """What it lacks it reads as 0 and never proposes; what the target lacks is cut before the softmax."""
    lm, prompt = resized(vocab), [1, 22, 3, VOCAB - 8, 5]
    decoder = Decoder(Model(target), CausalLMDrafter(lm, VOCAB), OptTree(30, 0.0, 1))
    known = min(vocab, VOCAB)
    text = list(prompt)
    for step in decoder.steps(prompt, NEW, stop=None):
        tree = step.tree
        assert tree.nodes == min(30, known) and set(tree.tokens[1:].tolist()) == set(range(known))
        read = [token if token < vocab else 0 for token in text]
        law = logits_after(lm.model, read)[:known].log_softmax(-1)
        assert tree.path_log_probs[1:] == pytest.approx(law[tree.tokens[1:]].numpy(), abs=1e-9)
        text += step.tokens
    assert text[len(prompt) :][:NEW] == written(target, prompt)
    again = decoder.generate([*prompt, 23, 22, 4], 5, stop=None, reuse=True)
    assert again.tokens == written(target, [*prompt, 23, 22, 4], 5)


def test_a_tree_may_be_grown_without_a_text(target: Any) -> None:
    drafter = drafter_of(target)
    with torch.inference_mode():
        tree = run_alone(grow(drafter, OptTree(5, 0.0, 1), PROMPT, 1))
    law = logits_after(drafter.lm.model, PROMPT).log_softmax(-1)
    assert tree.path_log_probs[1:].tolist() == pytest.approx(law[tree.tokens[1:]].tolist(), abs=1e-9)


class Few(CausalLMDrafter):
    """Drafts a few tokens of the target's, as a trimmed model does: its columns are these tokens."""

    def __init__(self, lm: Model, tokens: torch.Tensor) -> None:
        super().__init__(lm)
        self.take_model(lm, lm.vocab, lm.vocab, tokens)

    def read(self, output: Output) -> Any:
        return self.answer(output._replace(logits=output.logits[:, self.drafted.tokens]))


def test_a_draft_vocabulary_names_the_target_s_tokens(target: Any) -> None:
    tokens = torch.tensor([1, 4, 9, 11, 13, 20])
    lm = Model(network("llama", seed=3))
    decoder, text = Decoder(Model(target), Few(lm, tokens).calibrated(0.5), OptTree(4, 0.0, 1)), list(PROMPT)
    assert lm.drafted.columns == 6 and lm.drafted.tokens.tolist() == tokens.tolist()
    for step in decoder.steps(PROMPT, 9, stop=None):
        law = (logits_after(lm.model, text)[tokens] / 0.5).log_softmax(-1)
        values, places = law.topk(4)
        found = dict(zip(step.tree.tokens[1:].tolist(), step.tree.path_log_probs[1:], strict=True))
        if step.tree.nodes:
            assert found == pytest.approx(dict(zip(tokens[places].tolist(), values.tolist(), strict=True)), abs=1e-9)
        text += step.tokens
    assert lm.drafted.scale.tolist() == [2.0]
    assert decoder.generate(PROMPT, NEW, Temperature(0.9), None).steps and lm.drafted.scale.tolist() == [1.0]
    assert isinstance(decoder.drafter, OfModel)


class Picking(Backend):
    """Picks the best tokens of each row in its forward, as compiled ones do for a drafter's model."""

    def forward(self, inputs: Any, cache: Any) -> Output:
        output = super().forward(inputs, cache)
        if inputs.drafted is None:
            return output
        log_probs = (output.logits * inputs.drafted.scale).log_softmax(-1)
        tokens = log_probs.topk(8).indices.sort().values
        values = log_probs.gather(-1, tokens)
        return output._replace(best=torch.stack([values.view(torch.int64), tokens]))


@pytest.mark.parametrize("nodes", [6, 12])
def test_a_drafter_reads_what_its_model_picked(target: Any, nodes: int) -> None:
    """As long as the model is its own, and as many as may be wanted; else the logits."""
    draft = drafter_of(target).lm.model
    picking = CausalLMDrafter(Model(draft, Picking(draft))).calibrated(0.7)
    plain = CausalLMDrafter(Model(draft)).calibrated(0.7)
    found, expected = (
        Decoder(Model(target), one, OptTree(nodes, 0.0, 3)).generate(PROMPT, NEW, stop=None) for one in (picking, plain)
    )
    for one, other in zip(found.steps, expected.steps, strict=True):
        assert one.tree.tokens.tolist() == other.tree.tokens.tolist() and one.tokens == other.tokens
        assert one.tree.path_log_probs == pytest.approx(other.tree.path_log_probs, abs=1e-9)
    other = CausalLMDrafter(picking.lm)  # takes the model over, with another scale
    output = Output(torch.randn(1, VOCAB, dtype=torch.float64), best=torch.zeros(2, 1, 8, dtype=torch.int64))
    assert picking.answer(output).values.shape == (1, VOCAB) and other.answer(output).values.shape == (1, 8)
