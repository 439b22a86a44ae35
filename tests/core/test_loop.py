"""The loop on the core alone: plain backends, a draft model, OPT-Tree; every text is the network's own.

What is expected is computed by forwards of `transformers` over whole texts, without a cache, in float64.
"""

import inspect
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from networks import NEW, PROMPTS, TREES, drafter_of, logits_after, network, written

from opt_tree.backend import Backend
from opt_tree.children import LogProbs, TopK
from opt_tree.decoder import Decoder
from opt_tree.draft_model import CausalLMDrafter
from opt_tree.drafter import Drafter
from opt_tree.generation import Outcome
from opt_tree.model import Model
from opt_tree.policy import OptTree
from opt_tree.pool import CandidatePool, Frontier
from opt_tree.request import StopTokens
from opt_tree.sampling import Random, Temperature
from opt_tree.tree import Tree
from opt_tree.verify import match, valid_for


@pytest.fixture(scope="module", params=["llama", "qwen2"])
def target(request: pytest.FixtureRequest) -> Any:
    return network(request.param)


def test_a_greedy_text_is_the_network_s_whatever_the_tree(target: Any) -> None:
    drafter, most = drafter_of(target), 0.0
    for policy, prompt in [*product(TREES, PROMPTS[1:2]), *product(TREES[2:4], PROMPTS[::2])]:
        found = Decoder(Model(target), drafter, policy).generate(prompt, NEW, stop=None)
        assert found.tokens == written(target, prompt) and found.finish_reason == "length"
        assert sum(found.accept_lengths) == NEW and found.prompt == prompt
        assert all(step.tree.nodes <= policy.nodes for step in found.steps)
        assert all(step.tree.depths.max() <= policy.max_depth for step in found.steps)
        most = max(most, found.mean_acceptance_length)
    assert most > 2, "some of what is drafted is accepted"


def test_a_drafter_may_be_a_value() -> None:
    """A dataclass has no hash: it is locked, copied and told from others as an object."""

    @dataclass
    class Value(Drafter):
        token: int = 3

        def root(self, context: list[int]) -> LogProbs:
            return LogProbs(torch.tensor([[0.0]]), torch.tensor([[self.token]]))

        def expand(self, frontier: Frontier) -> LogProbs:
            return LogProbs(torch.zeros(len(frontier.tokens), 1), torch.full((len(frontier.tokens), 1), self.token))

        def accept(self, outcome: Outcome) -> None: ...

    model = network("llama")
    found = Decoder(Model(model), Value(), OptTree(4, 0.0, 3)).generate(PROMPTS[1], NEW, stop=None)
    assert found.tokens == written(model, PROMPTS[1]) and found.steps[0].tree.depths.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("length", [1, 2, 3])
def test_the_shortest_prompts_go_on_as_the_network_says(target: Any, length: int) -> None:
    """Of one token there is nothing to take in, of two a single row; the target then holds all but the root."""
    prompt, decoder = PROMPTS[1][:length], Decoder(Model(target), drafter_of(target), TREES[-1])
    assert decoder.generate(prompt, NEW, stop=None).tokens == written(target, prompt)
    step = next(decoder.steps(prompt, NEW, stop=None))
    assert decoder.target.length == length - 1 + len(step.path)


def test_a_node_s_probability_is_the_draft_model_s(target: Any) -> None:
    """Calibrated, of every path, by forwards over the whole text: rows see their path, at its positions."""
    drafter, text = drafter_of(target).calibrated(0.01), list(PROMPTS[1])
    for step in Decoder(Model(target), drafter, OptTree(8, 0.0, 4)).steps(text, 8, stop=None):
        for row in range(1, len(step.tree)):
            path, found = step.tree.tokens[step.tree.path_to(row)].tolist(), 0.0
            for end in range(1, len(path)):
                found += float(
                    logits_after(drafter.lm.model, text[:-1] + path[:end]).div(0.01).log_softmax(-1)[path[end]]
                )
            assert step.tree.path_log_probs[row] == pytest.approx(found, abs=1e-9)
        assert step.tree.depths.max() > 1
        text += step.tokens


class Laws:
    """A recorder: the whole law before each token in place of its likeliest ones."""

    def begin(self, vocab: int) -> None:
        self.rows, self.tokens = [], list[int]()

    def add(self, logits: torch.Tensor, scores: Any, path: list[int], tokens: list[int]) -> None:
        self.rows += [scores[row].log_softmax(-1) for row in path]
        self.tokens += tokens

    def told(self, length: int) -> tuple[list[float], list[dict[int, float]]]:
        kept = list(zip(self.rows, self.tokens, strict=True))[:length]
        return [float(row[token]) for row, token in kept], [dict(enumerate(row.tolist())) for row, _ in kept]


def test_a_recorder_is_shown_what_the_network_said_of_the_emitted_tokens(target: Any) -> None:
    decoder, recorder = Decoder(Model(target), drafter_of(target), TREES[2]), Laws()
    for prompt in PROMPTS[1:]:
        found = decoder.generate(prompt, NEW, stop=None, recorder=recorder)
        assert len(found.log_probs) == len(found.top_log_probs) == NEW <= len(recorder.tokens)
        for place, token in enumerate(found.tokens):
            law = logits_after(target, prompt + found.tokens[:place]).log_softmax(-1)
            assert found.log_probs[place] == pytest.approx(float(law[token]), abs=1e-9)
            assert [*found.top_log_probs[place].values()] == pytest.approx(law.tolist(), abs=1e-9)
    assert decoder.generate(prompt, 2).log_probs is None
    with pytest.raises(TypeError, match=r"recorder must be a Recorder, such as Recorder\(5\), got 5"):
        decoder.generate(prompt, NEW, recorder=5)


def test_rows_of_a_tree_see_their_ancestors_alone(target: Any) -> None:
    context = PROMPTS[1]
    tree = Tree.of([context[-1], 4, 8, 4, 2, 11, 2], [-1, 0, 0, 1, 1, 2, 3])
    model = Model(target)
    model.run(model.text(context[:-1]))
    found = model.run(model.tree(tree)).logits
    for row in range(len(tree)):
        path = tree.tokens[tree.path_to(row)].tolist()
        expected = logits_after(target, [*context[:-1], *path])
        torch.testing.assert_close(found[row], expected, rtol=0, atol=1e-10)


def test_after_a_commit_the_cache_is_that_of_the_text(target: Any) -> None:
    context, path = PROMPTS[1], [0, 2, 5]
    tree = Tree.of([context[-1], 4, 8, 4, 2, 11, 2], [-1, 0, 0, 1, 1, 2, 3])
    model, fresh = Model(target), Model(target)
    model.run(model.text(context[:-1]))
    model.run(model.tree(tree))
    model.commit(path)
    text = [*context[:-1], *tree.tokens[path].tolist()]
    fresh.run(fresh.text(text))
    assert model.length == fresh.length == len(text) == 9
    for mine, its in zip(model.cache.views, fresh.cache.views, strict=True):
        torch.testing.assert_close(mine[:, :, : len(text)], its[:, :, : len(text)], rtol=0, atol=1e-10)
    more = model.run(model.text([7]))
    torch.testing.assert_close(more.logits[-1], logits_after(target, [*text, 7]), rtol=0, atol=1e-10)


def test_a_tree_that_nobody_kept_is_forgotten(target: Any) -> None:
    context = PROMPTS[1]
    tree = Tree.of([context[-1], 4, 8, 4], [-1, 0, 0, 1])
    model = Model(target)
    model.run(model.text(context[:-1]))
    first = model.run(model.tree(tree)).logits.clone()
    torch.testing.assert_close(model.run(model.tree(tree)).logits, first, rtol=0, atol=1e-10)
    assert model.cache.pending == len(tree)
    more = model.run(model.text([context[-1], 5]))
    torch.testing.assert_close(more.logits[-1], logits_after(target, [*context, 5]), rtol=0, atol=1e-10)
    assert model.length == len(context) + 1 and model.cache.pending == 0


def test_a_prompt_has_logits_of_its_last_row_alone(target: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """An output layer over a whole prompt costs as much as its other layers."""
    asked, forward = [], target.forward

    def noted(*args: Any, **given: Any) -> Any:
        asked.append(given.get("logits_to_keep"))
        return forward(*args, **given)

    model = Model(target)
    noted.__signature__ = inspect.signature(forward)  # type: ignore[attr-defined]
    monkeypatch.setattr(target, "forward", noted)
    assert len(model.run(model.text(PROMPTS[1])).logits) == 1
    assert len(model.run(model.text(PROMPTS[1], all_logits=True)).logits) == len(PROMPTS[1])
    assert asked == [1, None]


class Padded(Backend):
    """Rows in multiples of eight and keys in multiples of sixteen, as a recorded forward has them; five at once."""

    rows_at_once = 5

    def shape(self, rows: int, first_slot: int) -> tuple[int, int]:
        padded = -(-rows // 8) * 8
        return padded, -(-(first_slot + padded) // 16) * 16


def test_a_backend_may_pad_in_front_and_run_in_parts(target: Any) -> None:
    """A backend of one's own is one class: what it overrides, and nothing of the loop, the drafter or the cache."""
    padded = Model(target, Padded(target))
    draft = drafter_of(target).lm.model
    for prompt in PROMPTS:
        decoder = Decoder(padded, CausalLMDrafter(Model(draft, Padded(draft))), TREES[2])
        assert decoder.generate(prompt, NEW, stop=None).tokens == written(target, prompt)
    before = padded.work
    padded.run(padded.text([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]))
    done = padded.work - before
    assert (done.forwards, done.tokens) == (3, 11) and done.seconds > 0


def test_a_plain_backend_has_no_hidden_states(target: Any) -> None:
    model = Model(target)
    model.watch(())
    with pytest.raises(ValueError, match=r"Backend has no hidden states to read, asked for layers \(0, -1\)"):
        model.watch((0, -1))
    assert not model.run(model.text(PROMPTS[1])).features


def test_a_seed_has_one_text_whatever_the_tree(target: Any) -> None:
    """And it is the one whose noise / probability is least at every place: an exponential race over the whole text."""
    drafter, sampling, prompt = drafter_of(target), Temperature(1.3), PROMPTS[2]
    text, random = list(prompt), Random(5)
    for _ in range(12):
        probs = (logits_after(target, text).float() / 1.3).softmax(-1)
        text.append(int(random.draw(probs[None], np.zeros(1, dtype=np.int64))))
        random.advance(1)
    for policy in TREES:
        found = Decoder(Model(target), drafter, policy).generate(prompt, 12, sampling, None, seed=5)
        assert found.tokens == text[len(prompt) :]
    decoder = Decoder(Model(target), drafter, policy)
    first = decoder.generate(prompt, 12, sampling, None, seed=0).tokens
    assert decoder.generate(prompt, 12, sampling, None).tokens == first != text[len(prompt) :]
    for random, expected in ((Random(5), text[len(prompt) :]), (None, first)):
        steps = decoder.steps(prompt, 12, sampling, random, stop=None)
        assert [token for step in steps for token in step.tokens][:12] == expected


def test_an_answer_stops_inside_a_path(target: Any) -> None:
    expected = written(target, PROMPTS[0])
    decoder = Decoder(Model(target), drafter_of(target), TREES[-1])
    for place in (0, 1, 4, 11):
        end = expected.index(expected[place])
        found = decoder.generate(PROMPTS[0], NEW, stop=StopTokens([expected[place]]))
        assert found.tokens == expected[: end + 1] and found.finish_reason == "stop_token"
        assert sum(found.accept_lengths) == end + 1
        assert decoder.generate(PROMPTS[0], place + 1, stop=None).tokens == expected[: place + 1]
        steps = list(decoder.steps(PROMPTS[0], NEW, stop=StopTokens([expected[place]])))
        tokens = [token for step in steps for token in step.tokens]
        assert tokens[: end + 1] == expected[: end + 1] and end < len(tokens) <= end + len(steps[-1].tokens)


def test_a_turn_goes_on_from_the_rows_of_the_last_one(target: Any) -> None:
    decoder = Decoder(Model(target), drafter_of(target), TREES[2])
    first = decoder.generate(PROMPTS[1], 9, stop=None)
    prompt = [*PROMPTS[1], *first.tokens, 2, 8]
    again = decoder.generate(prompt, NEW, stop=None, reuse=True)
    assert again.reused >= len(PROMPTS[1]) + 7 and again.tokens == written(target, prompt)
    other = decoder.generate([5, *prompt], 5, stop=None, reuse=True)
    assert other.reused == 0 and other.tokens == written(target, [5, *prompt], 5)


def test_the_context_ends_where_the_model_does() -> None:
    model = network("llama")
    short = Model(model)
    short.max_context = 20
    found = Decoder(short, drafter_of(model), TREES[-1]).generate(PROMPTS[1], 100, stop=None)
    assert found.tokens == written(model, PROMPTS[1], 13) and found.finish_reason == "context"


def test_the_context_ends_where_a_window_would_hide_its_first_token() -> None:
    model = network("mistral")
    for draft in (network("llama"), model):
        found = Decoder(Model(model), drafter_of(draft), TREES[2]).generate(PROMPTS[1], 100, stop=None)
        assert found.tokens == written(model, PROMPTS[1], 9) and found.finish_reason == "context"
    llama = network("llama")
    with pytest.warns(UserWarning, match="has positions for 16 tokens of context"):
        found = Decoder(Model(llama), drafter_of(model), TREES[2]).generate(PROMPTS[1], 20, stop=None)
    assert found.tokens == written(llama, PROMPTS[1], 20)


def test_a_tree_of_opt_tree_is_the_best_of_all() -> None:
    """Over laws at hand: E(A) against every tree of so many nodes over three tokens and three layers (Thm 3.1)."""
    rng = np.random.default_rng(3)
    every = [path for depth in (1, 2, 3) for path in product(range(3), repeat=depth)]
    for nodes in (1, 3, 5):
        laws = {path: torch.tensor(rng.dirichlet([0.7] * 3)).log() for path in [(), *every]}
        reach = {path: sum(float(laws[path[:i]][path[i]]) for i in range(len(path))) for path in every}
        policy = OptTree(nodes, 0.0, 3)
        pool = CandidatePool(0, TopK(total=nodes))
        paths: dict[int, tuple[int, ...]] = {0: ()}
        rows = np.array([0])
        while rows is not None and len(rows) and pool.depth < 3:
            pool.add(LogProbs.of(torch.stack([laws[paths[int(row)]] for row in rows])))
            for row in range(pool.layer, pool.size):
                paths[row] = (*paths[int(pool.parents[row])], int(pool.tokens[row]))
            rows = policy.expand(pool)
            if rows is not None:
                pool.frontier(rows)
        chosen = pool.tree(policy.select(pool))
        best = sum(sorted(map(np.exp, reach.values()), reverse=True)[:nodes])
        assert chosen.nodes == nodes and chosen.expected_accepted == pytest.approx(best, abs=1e-12)


def test_parts_that_do_not_belong_together_are_refused() -> None:
    model = network("llama")
    target, drafter = Model(model), drafter_of(model)
    with pytest.raises(TypeError, match="OptTree needs a drafter"):
        Decoder(target, None, OptTree(4))
    with pytest.raises(ValueError, match="is the target and drafts, too"):
        Decoder(target, CausalLMDrafter(target), OptTree(4))
    for wrong in ({"target": model}, {"drafter": model}, {"policy": 4}, {"verifier": print}):
        with pytest.raises(TypeError, match="is no"):
            Decoder(**({"target": target, "drafter": drafter, "policy": OptTree(4), "verifier": match} | wrong))
    lossy = valid_for(lossy=True)(lambda tree, logits, random: match(tree, logits, random))
    lossy.__name__ = "lossy"
    with pytest.raises(TypeError, match="verifier lossy does not keep the target's distribution; say lossy=True"):
        Decoder(target, drafter, OptTree(4), lossy)
    with pytest.raises(TypeError, match=r"custom_generate\(decoder\)"):
        Decoder(target, drafter, OptTree(4))(model, torch.tensor([[1]]))
