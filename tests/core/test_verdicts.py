"""Verdicts against their definition: the longest path of the tree that is the target's own choices, one by one."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from opt_tree.children import TopK
from opt_tree.sampling import LazyLogits, Random
from opt_tree.tree import Tree
from opt_tree.verify import Verdict, check, check_temperature, greedy, match, valid_for

VOCAB = 3
DTYPES = st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16])
SEEDS = st.integers(0, 10_000)


def some_tree(seed: int) -> tuple[Tree, Callable[[torch.dtype, float], Tensor]]:
    """A random tree, equal siblings among its rows, and logits, which paths of the same tokens share.

    `shift`: what is added to all logits of a row; it changes no distribution.
    """
    rng = np.random.default_rng(seed)
    rows = int(rng.integers(1, 14))
    parents = [-1, *(int(rng.integers(max(0, row - rng.integers(1, 9)), row)) for row in range(1, rows))]
    tree = Tree.of(rng.integers(0, VOCAB, rows).tolist(), parents)
    laws: dict[tuple[int, ...], np.ndarray] = {}
    drawn = [laws.setdefault(path_of(tree, row), rng.normal(size=VOCAB)) for row in range(rows)]
    return tree, lambda dtype, shift: (torch.from_numpy(np.array(drawn)) + shift).to(dtype)


def path_of(tree: Tree, row: int) -> tuple[int, ...]:
    return tuple(tree.tokens[tree.path_to(row)].tolist())


def by_definition(tree: Tree, choices: list[int]) -> Verdict:
    """Follow the choices of the rows; of equal rows the first."""
    first = {path_of(tree, row): row for row in reversed(range(len(tree)))}
    path = path_of(tree, 0)
    while (longer := (*path, choices[first[path]])) in first:
        path = longer
    return Verdict(tree.path_to(first[path]).tolist(), choices[first[path]])


def shown(logits: Tensor, lazy: bool, asked: list[int]) -> Tensor | LazyLogits:
    return LazyLogits(logits.shape, lambda row: asked.append(row) or logits[row]) if lazy else logits


@given(SEEDS, DTYPES, st.sampled_from([-20.0, 0.0, 20.0]), st.booleans(), st.booleans())
def test_greedy_follows_the_argmax(seed: int, dtype: torch.dtype, shift: float, lazy: bool, host: bool) -> None:
    """On the host or as on a device, where all choices are read at once."""
    tree, logits_of = some_tree(seed)
    logits, asked = logits_of(dtype, shift), list[int]()
    expected = by_definition(tree, [row.index(max(row)) for row in logits.tolist()])
    with pytest.MonkeyPatch.context() as patch:
        if not host:
            patch.setattr("opt_tree.verify.on_host", lambda tensor: False)
        lazy = lazy and dtype in (torch.float64, torch.float32)  # whoever is lazy has widened the logits
        assert greedy(tree, shown(logits, lazy, asked), Random()) == expected
    assert not lazy or len(asked) == len(expected.path)


@given(SEEDS, st.booleans())
@settings(max_examples=40)
def test_match_follows_the_draws_of_the_race(seed: int, lazy: bool) -> None:
    tree, logits_of = some_tree(seed)
    logits, asked, random = logits_of(torch.float64, 0.0), list[int](), Random(seed)
    random.advance(seed % 3)
    laws = logits.softmax(-1)
    choices = [int(random.draw(laws[row : row + 1], tree.depths[row : row + 1])) for row in range(len(tree))]
    verdict = match(tree, shown(logits, lazy, asked), random)
    assert verdict == by_definition(tree, choices)
    assert not lazy or len(asked) == len(verdict.path)


def test_a_child_is_accepted_with_the_targets_mass_on_the_distinct_children() -> None:
    """p = (.2, .5, .3) and children 0, 2, 2: .5, and the emitted token has the law p."""
    tree, law = Tree.of([1, 0, 2, 2], [-1, 0, 0, 0]), torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)
    logits, counts, accepted = law.log().expand(4, -1), np.zeros(3), 0
    random = Random(1)
    for _ in range(1500):
        verdict = match(tree, logits, random)
        random.advance(1)
        accepted += len(verdict.path) == 2
        counts[tree.tokens[verdict.path[1]] if len(verdict.path) == 2 else verdict.token] += 1
        assert len(verdict.path) == 1 or verdict.path[1] < 3
    assert accepted / 1500 == pytest.approx(0.5, abs=0.05)
    assert counts / 1500 == pytest.approx(law.numpy(), abs=0.05)


def test_a_verifier_says_what_it_is_exact_for() -> None:
    class Drawn(TopK):
        """Another kind of children."""

    @valid_for(Drawn, refuses=lambda children: "judges two at most" if children.per_node > 2 else None)
    def picky(tree, logits, random): ...

    check(picky, Drawn(2))
    with pytest.raises(TypeError, match=r"picky is not exact for children of type TopK; it is for Drawn$"):
        check(picky, TopK(2))
    with pytest.raises(TypeError, match=r"verifier picky judges two at most; got .*per_node=3"):
        check(picky, Drawn(3))
    lossy = valid_for(lossy=True)(lambda tree, logits, random: None)
    check(lossy, TopK(2), lossy=True)
    with pytest.raises(TypeError, match="does not keep the target's distribution; say lossy=True"):
        check(lossy, TopK(2))
    for exact in (greedy, match):
        check(exact, TopK(2)), check(exact, Drawn(2)), check_temperature(exact, 0)
        assert exact.valid_for == () and not exact.lossy and exact.refuses(TopK(1)) is None
    check_temperature(match, 0.5)
    with pytest.raises(ValueError, match=r"verifier greedy judges at temperature 0 only, got temperature 0\.5"):
        check_temperature(greedy, 0.5)


def test_greedy_tells_neighbours_apart_in_double_precision() -> None:
    """As many bits as the logits have: in float32 both would be equal, and the first one chosen."""
    logits = torch.tensor([[1.0, 1.0 + 2**-40, 0.0]], dtype=torch.float64)
    for scores in (logits, LazyLogits(logits.shape, logits.__getitem__)):
        assert greedy(Tree.of([0], [-1]), scores, Random()).token == 1
