"""Sampling at large vocabularies: nothing is sorted, copied or drawn that cannot matter, and nothing else changes."""

import numpy as np
import pytest
import torch
from asking import tiny_lm_drafter
from tiny_models import prompt, tiny
from transformers import TopPLogitsWarper

from opt_tree import CausalLM, Decoder, OptTree, Random, Sampling, TreePolicy, Verifier, match
from opt_tree.methods.children import drawn as children
from opt_tree.methods.policies.dyspec import DySpec
from opt_tree.methods.policies.rheo import Rheo
from opt_tree.methods.policies.sampled import Sampled
from opt_tree.methods.processors import cut
from opt_tree.methods.verifiers import walks
from opt_tree.methods.verifiers.block_verification import block
from opt_tree.methods.verifiers.k_sequential import k_seq
from opt_tree.methods.verifiers.multi_round_rejection import multi_round
from opt_tree.methods.verifiers.naive_tree import naive
from opt_tree.methods.verifiers.recursive_rejection import without_replacement
from opt_tree.methods.verifiers.rheo_sampling import rheo
from opt_tree.methods.verifiers.traversal_verification import traversal


def warped(rows: torch.Tensor, top_p: float) -> torch.Tensor:
    return TopPLogitsWarper(top_p)(None, rows.clone())


@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("spread", [0.5, 3.0, 9.0])
@pytest.mark.parametrize("vocab", [3, 61, 5000])
def test_the_cut_is_the_warpers(vocab, spread, top_p):
    rows = torch.randn(8, vocab, generator=torch.Generator().manual_seed(vocab)) * spread
    rows[0, ::2] = -torch.inf
    rows[1] = -torch.inf
    rows[2, 1] = torch.nan
    expected = warped(rows, top_p)
    assert torch.equal(cut(TopPLogitsWarper(top_p), rows.clone()).nan_to_num(7e7), expected.nan_to_num(7e7))


def test_equal_tokens_at_the_border_are_as_many_as_the_warper_keeps():
    rows = (torch.randn(20, 3000, generator=torch.Generator().manual_seed(0)) * 5).to(torch.bfloat16).float()
    ours, theirs = cut(TopPLogitsWarper(0.9), rows.clone()), warped(rows, 0.9)
    assert not torch.equal(ours, theirs), "some border has equal tokens on both sides"
    assert torch.equal(ours.sort().values, theirs.sort().values)
    for row, kept in zip(rows, ours > -torch.inf, strict=True):
        border = kept[row == row[kept].min()]
        assert border.equal(border.sort().values), "those of higher numbers stay"


CASES: list[tuple[Verifier, TreePolicy]] = [
    (match, OptTree(9, 0.0, 4)),
    (match, DySpec(9, max_depth=4)),
    (naive, Sampled.chains(3, 3)),
    (k_seq, Sampled.kary(2, 3)),
    (multi_round, Sampled.kary(2, 3)),
    (without_replacement, DySpec(9, max_depth=4)),
    (traversal, Sampled.chains(3, 3)),
    (traversal, DySpec(9, max_depth=4)),
    (block, Sampled.chain(4)),
    (rheo, Rheo(nodes=9)),
]


@pytest.mark.quick("match-OptTree-0.6", "without_replacement-DySpec-0.6", "rheo-Rheo-1.0")
@pytest.mark.parametrize("top_p", [0.6, 1.0])
@pytest.mark.parametrize(("verifier", "policy"), CASES, ids=lambda case: getattr(case, "__name__", type(case).__name__))
def test_texts_and_trees_are_those_of_whole_rows(verifier, policy, top_p, monkeypatch):
    """Beside a reference that sorts whole rows, and draws and judges over the whole vocabulary."""

    def run() -> list[tuple[list[int], list[int]]]:
        target = CausalLM(tiny("llama"))
        drafter = tiny_lm_drafter()
        steps = Decoder(target, drafter, policy, verifier).steps(prompt(9), 10, Sampling(0.7, top_p), Random(3))
        return [(step.tokens, step.tree.tokens.tolist()) for step in steps]

    found = run()
    monkeypatch.setattr("opt_tree.methods.processors.cut", lambda warper, rows: warper(None, rows))
    monkeypatch.setattr(walks, "_possible", lambda laws, drafted: np.arange(len(laws[0])))
    monkeypatch.setattr(children, "few_possible", lambda log_probs: None)
    assert run() == found
