"""The race by which `Random` draws: its numbers, its law, what it depends on, and how little rounding moves it."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import chdtrc
from torch import Tensor

from opt_tree import sampling as module
from opt_tree.sampling import Random

HOST = torch.device("cpu")
GAMMA, WORD = 0x9E3779B97F4A7C15, 2**64
LAW = torch.tensor([0.35, 0.0, 0.2, 0.05, 0.4], dtype=torch.float64)
POSITIONS = np.arange(6000)


def numbers(state: int, count: int) -> list[int]:
    """SplitMix64 as published, with whole numbers of any size."""
    found = []
    for _ in range(count):
        state = (state + GAMMA) % WORD
        z = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 % WORD
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % WORD
        found.append(z ^ (z >> 31))
    return found


def noise_of(random: Random, depths: np.ndarray, vocab: int, device: torch.device) -> Tensor:
    """The noise of every token, so many tokens ahead."""
    return module.noise_from(torch.from_numpy(random.starts(depths)).to(device), vocab)


def quantiles(noise: Tensor) -> np.ndarray:
    return (-noise).exp().numpy()


def agree(counts: np.ndarray, probs: np.ndarray) -> bool:
    """Pearson's chi-square test at one in a thousand; the seeds are fixed, so a verdict stays."""
    assert counts[probs == 0].sum() == 0
    seen, expected = counts[probs > 0], counts.sum() * probs[probs > 0]
    return bool(chdtrc(len(seen) - 1, ((seen - expected) ** 2 / expected).sum()) > 1e-3)


# ---- the numbers


def test_the_numbers_are_splitmix64s_as_published() -> None:
    """Against the first numbers of seed 1234567 that are in circulation, and the noise against its definition."""
    known = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821]
    assert numbers(1234567, 5) == known
    for seed, position in [(0, 0), (7, 3), (2**64 - 1, 10**6)]:
        random = Random(seed)
        random.advance(position)
        start = int(np.random.SeedSequence(seed, spawn_key=(position,)).generate_state(1, np.uint64)[0])
        expected = [-np.log(((word >> 12) + 0.5) / 2**52) for word in numbers(start, 40)]
        assert noise_of(random, np.zeros(1, np.int64), 40, HOST)[0].tolist() == pytest.approx(expected, rel=1e-14)


@pytest.mark.parametrize("word", [0, -1, 1, -(2**63), 2**63 - 1])
def test_noise_is_neither_nothing_nor_endless(word: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the words at either end, whatever the generator gives."""
    monkeypatch.setattr(module, "_mix", lambda states: states)
    for states in (torch.tensor([word]), np.array([word])):
        assert 1e-16 < module._exponential(states).item() < 37


def test_the_noise_of_every_token_is_exponential_and_so_is_the_least() -> None:
    noise = noise_of(Random(1), np.arange(200), 2000, HOST)
    cells = np.bincount((quantiles(noise).ravel() * 1000).astype(int), minlength=1000)
    assert agree(cells, np.full(1000, 1e-3))
    least = noise.amin(1) * 2000  # of n arrivals the first is n times as fast: it decides races
    assert agree(np.bincount((quantiles(least) * 10).astype(int), minlength=10), np.full(10, 0.1))


@pytest.mark.parametrize("pair", ["tokens", "positions", "seeds", "position and token", "seed and position"])
def test_neighbours_know_nothing_of_each_other(pair: str) -> None:
    """Two quantiles fall into 16 x 16 cells as independent ones do, however near their keys are."""
    depths = np.arange(101)
    one, next_seed = (noise_of(Random(seed), depths, 501, HOST) for seed in (5, 6))
    sides = {
        "tokens": (one[:, :-1], one[:, 1:]),
        "positions": (one[:-1], one[1:]),
        "seeds": (one, next_seed),
        "position and token": (one[:-1, 1:], one[1:, :-1]),
        "seed and position": (one[1:], next_seed[:-1]),
    }[pair]
    cells = [(quantiles(side).ravel() * 16).astype(int) for side in sides]
    assert agree(np.bincount(cells[0] * 16 + cells[1], minlength=256), np.full(256, 1 / 256))


# ---- the draw


@given(st.integers(0, 2**32), st.sampled_from([torch.float64, torch.float32, torch.bfloat16]), st.integers(2, 40))
@settings(max_examples=40)
def test_a_draw_is_the_first_arrival(seed: int, dtype: torch.dtype, vocab: int) -> None:
    random, depths = Random(seed), np.array([0, 2, 2, 1])
    probs = torch.from_numpy(np.random.default_rng(seed).dirichlet(np.full(vocab, 0.3), 4)).to(dtype)
    noise = noise_of(random, depths, vocab, HOST)
    for row, token in enumerate(random.draw(probs, depths).tolist()):
        arrivals = [n / p if p else np.inf for n, p in zip(noise[row].tolist(), probs[row].tolist(), strict=True)]
        assert token == int(np.argmin(arrivals))


def test_a_draw_has_the_law_it_is_drawn_from() -> None:
    """Along the positions of a seed and along seeds, alone and with the next draw; the law need not be normalised."""
    probs, joint = LAW.numpy(), np.outer(LAW, LAW).ravel()
    for law in (LAW, LAW.flip(0)):  # each position's noise is shared: both laws are drawn from all the same
        rows = law.expand(len(POSITIONS), -1)
        drawn = Random(9).draw(rows, POSITIONS)
        assert agree(np.bincount(drawn.numpy(), minlength=5), law.numpy())
        assert torch.equal(Random(9).draw(rows[:500] * 3, POSITIONS[:500]), drawn[:500])
    along = Random(3).draw(LAW.expand(len(POSITIONS), -1), POSITIONS).numpy()
    assert agree(np.bincount(along, minlength=5), probs)
    assert agree(np.bincount(along[::2] * 5 + along[1::2], minlength=25), joint)
    first, second = (
        torch.stack([Random(seed).draw(LAW[None], np.array([0])) for seed in range(side, 1200, 2)])[:, 0]
        for side in (0, 1)
    )
    assert agree(np.bincount(torch.cat([first, second]).numpy(), minlength=5), probs)
    assert agree(np.bincount((first * 5 + second).numpy(), minlength=25), joint)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_token_of_probability_zero_is_never_drawn(dtype: torch.dtype) -> None:
    """First, last and in the middle; beside one that is certain, and beside ones that are nearly nothing."""
    rows = torch.tensor([[0.0, 0.1, 0.0, 0.9, 0.0], [0.0, 0.0, 1e-38, 1.0, 0.0], [0.0, 1e-38, 0.0, 1e-38, 0.0]])
    drawn = Random(2).draw(rows.to(dtype).repeat(1000, 1), np.arange(3000)).view(1000, 3)
    assert (rows[torch.arange(3), drawn] > 0).all() and (drawn[:, 1] == 3).all()


def test_what_is_not_among_the_columns_changes_no_draw() -> None:
    """Noise is a token's own: cut tails, wider vocabularies and tokens ruled out leave the winner where it can win."""
    law = torch.full((1, 50), 0.02, dtype=torch.float64)
    for position in range(200):
        depths = np.array([position])
        token = Random(4).draw(law, depths)
        assert Random(4).draw(torch.nn.functional.pad(law, (0, 30)), depths) == token
        assert Random(4).draw(law[:, : int(token) + 1], depths) == token
        cut = law.clone()
        cut[:, (token + 1) % 50] = 0
        assert Random(4).draw(cut, depths) == token


def test_the_race_is_the_same_where_torch_runs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device integers and logarithms are torch's; on a host they are numpy's."""
    law, depths = torch.rand(40, 3000, generator=torch.Generator().manual_seed(0)), np.arange(40) % 30
    here, noise = Random(6).draw(law, depths), noise_of(Random(6), depths, 3000, HOST)
    monkeypatch.setattr(module, "on_host", lambda tensor: False)
    assert torch.equal(Random(6).draw(law, depths), here)
    assert torch.allclose(noise_of(Random(6), depths, 3000, HOST), noise, rtol=1e-13, atol=1e-15)


# ---- seeds and positions


def test_a_position_is_decided_by_its_number_however_the_steps_fall() -> None:
    law = torch.full((1, 1000), 1e-3, dtype=torch.float64)
    ahead = Random(3).draw(law.expand(100, -1), np.arange(100)).tolist()
    assert len(set(ahead)) > 80
    random, position = Random(3), 0
    for emitted in (1, 4, 1, 30, 2, 33, 1):
        depths = np.array([0, 1, emitted + 2])
        assert random.draw(law.expand(3, -1), depths).tolist() == [ahead[position + depth] for depth in depths]
        random.advance(emitted)
        position += emitted
    assert random.draw(law, np.array([3])).tolist() == [ahead[position + 3]]


def test_fresh_numbers_have_the_laws_they_stand_for() -> None:
    random, probs = Random(0), LAW.numpy()
    assert agree(np.bincount([random.choose(probs * 3) for _ in range(4000)], minlength=5), probs)
    assert agree(np.bincount([random.accept(0.3) for _ in range(4000)], minlength=2), np.array([0.7, 0.3]))
    assert not any(random.accept(0.0) for _ in range(100)) and all(random.accept(1.0) for _ in range(100))


def test_fresh_numbers_are_numpys_of_the_seed() -> None:
    """A text that is drawn with them is the same next year."""
    for seed in (5, -3):
        random, numbers = Random(seed), np.random.default_rng((seed % 2**64, 1))
        for chance in numbers.random(20):
            assert random.fresh.random() == chance
    random, chances = Random(5), np.random.default_rng((5, 1)).random(60)
    for chance, next_chance in zip(chances[::2], chances[1::2], strict=True):
        assert random.accept(0.4) == (chance < 0.4)
        assert random.choose(np.array([0.2, 0.0, 0.6])) == (0 if next_chance < 0.25 else 2)


def test_fresh_numbers_leave_draws_alone() -> None:
    law = torch.full((1, 1000), 1e-3, dtype=torch.float64)
    one, other = Random(5), Random(5)
    one.accept(0.5), one.choose(law[0].numpy())
    assert one.draw(law, np.array([4])) == other.draw(law, np.array([4]))
    assert Random(5).accept(0.5) == Random(5).accept(0.5)


def test_a_seed_fixes_the_draws_and_fits_into_64_bits() -> None:
    law = torch.full((8, 1000), 1e-3, dtype=torch.float64)
    first, again, other = (Random(seed).draw(law, np.arange(8)).tolist() for seed in (1, 1, 2))
    assert first == again != other
    for seed in (2**64, -(2**63) - 1):
        with pytest.raises(ValueError, match=f"seed must fit into 64 bits, got {seed}"):
            Random(seed)


# ---- rounding


def test_rounding_moves_no_draw_of_a_large_vocabulary() -> None:
    """The logits of 49,152 tokens change in their seventh digit: the race stays, an inverted sum moves by a token."""
    generator = torch.Generator().manual_seed(1)
    logits = -1.2 * torch.arange(1.0, 49_153.0).log()[None]
    logits = logits[:, torch.randperm(49_152, generator=generator)]
    rounded = logits + 2e-6 * torch.randn(logits.shape, generator=generator)
    laws = [logits.softmax(-1), rounded.softmax(-1)]
    for position in range(200):
        one, other = (Random(8).draw(law, np.array([position])) for law in laws)
        assert one == other
    uniforms = torch.rand(1, 20_000, generator=generator, dtype=torch.float64)
    one, other = (torch.searchsorted(law.cumsum(-1, dtype=torch.float64), uniforms) for law in laws)
    assert (one != other).double().mean() > 5e-4


@pytest.mark.parametrize("error", [0.05, 0.005])
def test_a_race_turns_no_oftener_than_its_two_fastest_are_near(error: float) -> None:
    """At most 2d (1 - sum of p^2) of the races, where log-probabilities differ by at most d; the bound is attained."""
    probs = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    moved = probs * torch.tensor([error, -error, -error], dtype=torch.float64).exp()
    one, other = (Random(7).draw(law.expand(len(POSITIONS), -1), POSITIONS) for law in (probs, moved))
    turned, bound = float((one != other).double().mean()), 2 * error * (1 - float(probs.square().sum()))
    assert 0.3 * bound < turned < bound + 4 * (bound / len(POSITIONS)) ** 0.5


@pytest.mark.parametrize("probs", [[0.2, np.nan, 0.3], [0.0, 0.0]])
def test_no_token_is_drawn_from_what_are_no_probabilities(probs: list[float]) -> None:
    with pytest.raises(ValueError, match="no token can be drawn"):
        Random().choose(np.array(probs))
