"""What tables say on tensors is what they say on the host: tokens, their order, every bit of their probabilities."""

import itertools
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from backends.test_device_step import DRAFTERS, DRAWN, ONE_PASS, network, same, steps_are_launched_ahead  # noqa: F401
from backends.test_tensor_pool import POLICIES
from tiny_models import VOCAB, prompt, tiny

from opt_tree import Decoder, OptTree, Sampling
from opt_tree.backends.device_decoder import DEVICE
from opt_tree.backends.tensor_drafter import Behind
from opt_tree.draft_model import CausalLMDrafter
from opt_tree.methods.drafters.combined.copying import Copying
from opt_tree.methods.drafters.combined.grafted import Grafted
from opt_tree.methods.drafters.tables.ngram import Interpolated, NGramDrafter
from opt_tree.methods.drafters.tables.store import FOLLOWERS, Store, StoreDrafter
from opt_tree.models.causal_lm import CausalLM
from opt_tree.tools.on_device import on_device
from opt_tree.tools.table_tensors import Tabled
from opt_tree.training.answers import join
from opt_tree.training.fitting.store import Recipe, build

FEW = 7
"""Tokens of the texts here, so that counts tie everywhere."""


def text_of(length: int, seed: int, tokens: int = FEW) -> list[int]:
    return np.random.default_rng(seed).integers(0, tokens, length).tolist()


def store_of(key_bytes: int = 4, many: bool = False) -> Store:
    texts = [np.array(text_of(120, seed)) for seed in range(3)]
    if many:
        texts.append(np.array([token for other in range(VOCAB) for token in (1, other)]))
    with patch("opt_tree.training.fitting.store._key_bytes", lambda entries: key_bytes):
        return Store(build(join(texts), Recipe(VOCAB, order=3)))


TABLES = {
    "ngram": lambda: NGramDrafter(),
    "ngram, the longest match alone": lambda: NGramDrafter((0, 0, 0)),
    "store": lambda: StoreDrafter(store_of(), (30.0, 3.0, 1.0)),
    "store, the longest match alone": lambda: StoreDrafter(store_of(), longest=True),
    "store of 64 bits": lambda: StoreDrafter(store_of(8), (3.0, 2.0, 1.0)),
    "store, keys that collide": lambda: StoreDrafter(store_of(1), (3.0, 2.0, 1.0)),
    "store of many followers": lambda: StoreDrafter(store_of(many=True), (3.0, 2.0, 1.0)),
}


def asked(table: Tabled, context: list[int], nodes: int, tails: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """What a table says of the root and of some tails, a row each."""
    more = torch.from_numpy(table.sent(context, 4, torch.device("cpu")))
    nothing = torch.zeros(0, dtype=torch.long)
    table.begin(Behind(None, 1 << 20, nothing, None, nothing, nothing, more, nodes))  # type: ignore[arg-type]
    root = table._look_up(), table.named
    table._tails = torch.tensor([[-1] * (table.drafter.order - len(tail)) + tail for tail in tails])
    found = table._look_up(), table.named
    return tuple(torch.cat(parts) for parts in zip(root, found, strict=True))  # type: ignore[return-value]


def check(drafter: Interpolated, table: Tabled, context: list[int], seed: int, nodes: int = 200) -> int:
    """Raise AssertionError where the two say other things; return how many tokens the widest row names."""
    order = drafter.order
    tails = [text_of(order, place + 100 * seed) for place in range(8)] + [[1], context[-order:], [VOCAB - 1] * order]
    values, tokens = asked(table, context, nodes, tails)
    widest = 0
    for place, tail in enumerate([context[-order:], *tails]):
        law = drafter.law(tuple(tail))
        there = values[place] > -torch.inf
        named = dict(zip(tokens[place][there].tolist(), values[place][there].tolist(), strict=True))
        best = sorted(law, key=lambda token: -law[token])[:nodes]
        expected = {token: np.float64(torch.tensor(law[token], dtype=torch.float64).log()) for token in law}
        assert list(named.items()) == [(token, expected[token]) for token in law if token in best]
        widest = max(widest, len(law))
    return widest


@pytest.mark.parametrize("name", sorted(TABLES))
def test_laws_are_the_hosts_to_the_last_bit(name):
    """Also while the text grows, and where it is shorter than a tail; ties are cut where the host cuts them."""
    drafter = TABLES[name]()
    table, widest = Tabled(drafter), 0
    for seed, length in enumerate((1, 60)):
        context = text_of(length, seed)
        drafter.begin(context, 0, None, Sampling())
        for new in (7, 1):  # 5 are appended at most; of more, all are sent anew
            widest = max(widest, check(drafter, table, context, seed))
            check(drafter, table, context, seed, nodes=2)
            more = text_of(new, 50 + new)
            drafter.text.counts.add(more)
            context += more
    assert widest > 3


def test_a_text_outgrows_its_places_and_its_vocabulary(monkeypatch):
    monkeypatch.setattr("opt_tree.tools.table_tensors._LEAST_PLACES", 8)
    monkeypatch.setattr("opt_tree.tools.table_tensors._LEAST_VOCAB", 4)
    drafter = TABLES["store"]()
    table, context = Tabled(drafter), [1, 2, 1]
    drafter.begin(context, 0, None, Sampling())
    for more in ([2, 3], [1, 2, 1], [40, 1, 2], [1], [40], text_of(20, 3), [63]):
        check(drafter, table, context, 1)
        drafter.text.counts.add(more)
        context += more
    check(drafter, table, context, 1)


@pytest.mark.quick("ngram")
@pytest.mark.parametrize("name", ["ngram", "store"])
def test_texts_and_trees_are_those_of_the_host(name):
    target = CausalLM(tiny("llama"))
    for policy, sampling in ((OptTree(12, 0.0, 5), DRAWN), (OptTree(40, 0.1, 7), Sampling())):
        compared(Decoder(target, TABLES[name](), policy), sampling, (40, 1)[: sampling.greedy + 1])


def compared(decoder: Decoder, sampling: Sampling, lengths: tuple[int, ...]) -> None:
    """Raise AssertionError where the device's texts and trees are others, text after text."""
    device = on_device(decoder)
    for length in lengths:
        text = text_of(length, 3)
        found = device.generate(text, 12, sampling, seed=2)
        close = 1e-3 if decoder.target.dtype == torch.float32 else 1e-9
        same(found, decoder.generate(text, 12, sampling, seed=2), close)
        assert device.taken[DEVICE] >= len(found.steps) - 1 > 0


JOINED = {
    "graft of a draft model": lambda **how: Grafted(drafter_of("lm", **how), TABLES["store"]()),
    "graft of a head": lambda **how: Grafted(drafter_of("eagle", **how), TABLES["ngram"]()),
    "graft of one pass": lambda **how: Grafted(drafter_of("parallelspec", **how), TABLES["store"]()),
    "graft of a block": lambda **how: Grafted(drafter_of("dspark", **how), TABLES["store"]()),
    "copy of a draft model": lambda **how: Copying(drafter_of("lm", **how)),
    "copy of a head of fewer tokens": lambda **how: Copying(drafter_of("eagle3", **how)),
    "graft of a copy of a head": lambda **how: Grafted(Copying(drafter_of("eagle", **how)), TABLES["store"]()),
}


def drafter_of(name: str, target: CausalLM, lm: CausalLM) -> Any:
    return {**DRAFTERS, **ONE_PASS}[name](lm, target)


@pytest.mark.quick("graft of a head")
@pytest.mark.parametrize("name", sorted(JOINED))
def test_models_beside_tables(name):
    """In both widths; a second text begins anew, and an accepted path is caught up with."""
    for dtype, sampling in ((torch.float64, Sampling()), (torch.float32, DRAWN)):
        target, lm = (CausalLM(network("llama", dtype, drafts)) for drafts in (False, True))
        policy = OptTree(12, 0.05, 5)
        compared(Decoder(target, JOINED[name](target=target, lm=lm), policy), sampling, (30, 2)[: sampling.greedy + 1])


def test_the_host_goes_on_where_the_model_ends():
    target, lm = (CausalLM(network("llama", torch.float64, drafts)) for drafts in (False, True))
    drafter = Grafted(CausalLMDrafter(lm, VOCAB), TABLES["ngram"]())
    drafter.drafter.max_context = 40
    device = on_device(decoder := Decoder(target, drafter, OptTree(12, 0.05, 5)))
    same(device.generate(text_of(30, 1), 30), decoder.generate(text_of(30, 1), 30))
    assert min(device.taken[DEVICE], device.taken["the table drafts alone"]) > 1


@pytest.mark.slow
def test_steps_of_both_kinds_in_one_text():
    for name in ("graft of a copy of a head", "graft of a draft model"):
        target, lm = (CausalLM(network("llama", torch.float64, drafts)) for drafts in (False, True))
        decoder = Decoder(target, JOINED[name](target=target, lm=lm), OptTree(12, 0.05, 5))
        device, turns = on_device(decoder), itertools.count()
        known = device._reason

        def reason(run: Any, known: Any = known, turns: Any = turns) -> Any:
            return known(run) or ("its turn" if next(turns) % 3 == 1 else None)

        device._reason = reason
        same(device.generate(text_of(30, 2), 24), decoder.generate(text_of(30, 2), 24))
        assert min(device.taken[DEVICE], device.taken["its turn"]) > 2


def test_a_graft_of_more_layers_takes_the_hosts_step():
    target, lm = (CausalLM(network("llama", torch.float64, drafts)) for drafts in (False, True))
    device = on_device(Decoder(target, Grafted(CausalLMDrafter(lm, VOCAB), NGramDrafter(), 2), OptTree(12)))
    assert "Grafted drafts on the host" in repr(device)


def test_a_store_of_nothing():
    drafter = StoreDrafter(Store(build(join([np.array([3])]), Recipe(VOCAB, order=2))), (1.0, 1.0))
    drafter.begin(prompt(9), 0, None, Sampling())
    check(drafter, Tabled(drafter), prompt(9), 1)


def test_followers_are_as_many_as_a_store_keeps():
    assert max(np.diff(store_of(many=True).arrays[1].astype(int))) == FOLLOWERS


def test_a_policy_that_sorts_otherwise_takes_the_hosts_step():
    device = on_device(Decoder(CausalLM(tiny("llama")), NGramDrafter(), POLICIES["eagle2"]))
    assert "Eagle2 picks any of a table's ties" in repr(device)
