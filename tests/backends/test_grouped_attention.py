"""Attention of grouped queries: what transformers computes, put in its place inside a body only."""

import threading

import pytest
import torch
from tiny_models import prompt, tiny
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from opt_tree.backends.grouped_attention import Grouped, grouped_attention
from opt_tree.models.causal_lm import CausalLM


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("heads", ["one", "each", "none"])
def test_grouped_queries_attend_as_they_do_one_by_one(rows, heads):
    """With a mask for all heads, one for each, and without; two layers, one after the other."""
    attention, module, grouped = torch.Generator().manual_seed(rows), torch.nn.Module(), Grouped()
    module.num_key_value_groups, module.is_causal = 3, False
    for _ in range(2):
        query = torch.randn(2, rows, 6, 8, generator=attention, dtype=torch.float64).transpose(1, 2)
        key, value = torch.randn(2, 2, 2, 9, 8, generator=attention, dtype=torch.float64)
        mask = torch.randn(2, 1 if heads == "one" else 6, rows, 9, generator=attention, dtype=torch.float64)
        given = None if heads == "none" else mask
        found, _ = grouped(module, query, key, value, given, scaling=0.3)
        expected, _ = sdpa_attention_forward(module, query, key, value, given, scaling=0.3)
        assert found.is_contiguous() and found.shape == expected.shape == (2, rows, 6, 8)
        assert (found - expected).abs().max() < 1e-12


def test_it_is_in_place_inside_only(monkeypatch):
    """After an error, too; and what a user has put there stays."""
    with pytest.raises(ValueError), grouped_attention(), grouped_attention():
        assert ALL_ATTENTION_FUNCTIONS["sdpa"] is not sdpa_attention_forward
        raise ValueError
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is sdpa_attention_forward
    seen: list[int] = []

    def users(*args: object, **kwargs: object) -> object:
        seen.append(1)
        return sdpa_attention_forward(*args, **kwargs)

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "sdpa", users)
    lm = CausalLM(tiny("llama"))
    seen.clear()
    lm.append(prompt(3))
    assert len(seen) == lm.model.config.num_hidden_layers


def test_other_threads_keep_the_attention_of_transformers(monkeypatch):
    """Also those that run a model of their own at that moment."""
    calls: list[str] = []

    def counted(self: Grouped, *args: object, **more: object) -> tuple[torch.Tensor, None]:
        calls.append(threading.current_thread().name)
        return torch.zeros(0), None

    monkeypatch.setattr(Grouped, "__call__", counted)

    def attend() -> None:
        query, key = torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3, 4)
        module = torch.nn.Module()
        module.num_key_value_groups, module.is_causal = 1, False
        ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, key, None)

    with grouped_attention():
        attend()
        other = threading.Thread(target=attend, name="other")
        other.start()
        other.join()
    assert calls == [threading.current_thread().name]
