"""Targets that scale or cap what their output layer gives: what drafts by that layer drafts by the target's logits."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from asking import Witness, begin, root_of
from methods.drafters.test_blocks import block_of, dspark_of
from methods.drafters.test_eagle3 import tiny_head3
from methods.drafters.test_early_exit import exit_of
from methods.drafters.test_parallel_spec import head_of
from tiny_models import HIDDEN, VOCAB, WIDTH, build, causal_logits, prompt, tiny_head
from torch import nn

from opt_tree import Decoder, OptTree
from opt_tree.methods.drafters.heads.eagle import EagleDrafter
from opt_tree.methods.drafters.heads.eagle3 import Eagle3Drafter
from opt_tree.methods.drafters.heads.early_exit import EarlyExit
from opt_tree.methods.drafters.heads.one_pass import MedusaDrafter, MedusaHeads
from opt_tree.methods.drafters.heads.parallel_spec import ParallelSpecDrafter
from opt_tree.models.causal_lm import CausalLM
from opt_tree.models.output_scaling import Scaling, scaling_of
from opt_tree.training.heads.features import COUNTS
from opt_tree.training.heads.head_loss import JudgedEntropy, TargetSide, columns_of
from opt_tree.training.plans import MedusaPlan

pytestmark = pytest.mark.slow

GRANITE = {"embedding_multiplier": 1.0, "residual_multiplier": 1.0, "attention_multiplier": 8**-0.5}
MINI = {"q_lora_rank": 8, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
SCALED = {
    "divided": ("GraniteConfig", {"logits_scaling": 8.0}, Scaling(1 / 8)),
    "multiplied": ("CohereConfig", {"logit_scale": 0.25}, Scaling(0.25)),
    "multiplied by what divides elsewhere": ("HyperCLOVAXConfig", {"logits_scaling": 0.3}, Scaling(0.3)),
    "capped": ("Gemma2Config", {"head_dim": 8, "final_logit_softcapping": 3.0}, Scaling(cap=3.0)),
    "capped by default": ("NanoChatConfig", {}, Scaling(cap=15.0)),
    "neither": ("LlamaConfig", {}, Scaling()),
}


def config(kind, **changes):
    return getattr(transformers, kind)(**(WIDTH | changes))


def twins(scale=16.0):
    """A Llama, and a Granite that computes the same function: its output rows are larger, and its logits divided."""
    layers = {"num_hidden_layers": 4}
    llama = build(config("LlamaConfig", **layers))
    granite = build(config("GraniteConfig", logits_scaling=scale, **layers, **GRANITE))
    tensors = llama.state_dict()
    granite.load_state_dict(tensors | {"lm_head.weight": tensors["lm_head.weight"] * scale})
    return CausalLM(llama), CausalLM(granite)


def medusa(target):
    heads = MedusaHeads(HIDDEN, VOCAB, 3, own_output=False).double().eval().requires_grad_(False)
    for weight in heads.parameters():
        nn.init.normal_(weight, std=0.1, generator=torch.Generator().manual_seed(5))
    return MedusaDrafter(heads, target)


def shared_eagle3(target):
    head = tiny_head3(target)
    del head.lm_head
    return Eagle3Drafter(head, target, tokens=torch.arange(0, VOCAB, 2))


KINDS = {
    "eagle": lambda target: EagleDrafter(tiny_head(target.model), target),
    "eagle, draft vocabulary": lambda target: EagleDrafter(tiny_head(target.model), target, tokens=torch.arange(30)),
    "eagle3": shared_eagle3,
    "medusa": medusa,
    "dflash": lambda target: block_of(target, (0, 1)),
    "dspark": lambda target: dspark_of(target, layers=(0, 1)),
    "parallelspec": lambda target: ParallelSpecDrafter(head_of(target), target),
    "exit": lambda target: EarlyExit(exit_of(target), target),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_head_s_laws_are_the_same_for_a_target_that_divides_its_logits(kind):
    found = []
    for target in twins():
        witness = Witness(KINDS[kind](target))
        text = Decoder(target, witness, OptTree(7, 0.0, 4)).generate(prompt(9), 12).tokens
        found.append((text, witness.laws))
    (text, laws), (other, others) = found
    assert text == other and len(laws) == len(others) > 10
    for (_, path, law), (_, path_, law_) in zip(laws, others, strict=True):
        assert path == path_ and torch.allclose(law, law_, atol=1e-8)


@pytest.mark.parametrize("name", SCALED)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_scaling_is_found_whatever_its_name(name, dtype):
    kind, changes, expected = SCALED[name]
    found = scaling_of(build(config(kind, **changes), dtype=dtype))
    assert found.cap == expected.cap
    assert found.factor == pytest.approx(expected.factor, rel=1e-9 if dtype == torch.float64 else 2e-3)


@pytest.mark.parametrize("name", SCALED)
def test_a_head_that_estimates_the_target_s_own_state_drafts_its_very_logits(name):
    """Medusa's heads of zero weights leave the feature as it is."""
    kind, changes, _ = SCALED[name]
    target = CausalLM(build(config(kind, **changes)))
    heads = MedusaHeads(HIDDEN, VOCAB, 1, own_output=False).double().eval().requires_grad_(False)
    drafter, text = MedusaDrafter(heads, target), prompt(9)
    target.watch(drafter.features)
    begin(drafter, text, target.append(text[:-1]))
    expected = causal_logits(target.model, text[:-1])[-1].log_softmax(-1)
    assert torch.allclose(root_of(drafter, text).values[0], expected, atol=1e-5)


def test_what_is_no_scaling_is_told_once():
    bent = build(config("LlamaConfig"))
    bent.register_forward_hook(lambda _module, _inputs, output: SimpleNamespace(logits=output.logits.abs().sqrt()))
    with pytest.warns(UserWarning, match="the logits of LlamaForCausalLM are not its output layer's numbers times"):
        assert scaling_of(bent) == Scaling()


@pytest.mark.parametrize("shared", [True, False])
def test_a_cap_is_part_of_what_a_head_is_judged_by(shared):
    """And of its own law where the output layer is the target's; its gradient is autograd's."""
    torch.manual_seed(0)
    estimates, states = torch.randn(2, 200, 8, requires_grad=True), torch.randn(200, 8)
    output, weights = 2 * torch.randn(20, 8), torch.ones(2, 200)
    own = output if shared else torch.randn(20, 8, requires_grad=True)
    loss, _ = JudgedEntropy.apply(estimates, weights, own, TargetSide(states, output, cap=3.0))
    capped = Scaling(cap=3.0)
    logits = estimates @ own.T
    law = (capped(logits) if shared else logits).log_softmax(-1)
    expected = -(capped(states @ output.T).softmax(-1) * law).sum(-1).mean(1)
    assert torch.allclose(loss, expected, atol=1e-5)
    ours, theirs = (torch.autograd.grad(x.sum(), estimates)[0] for x in (loss, expected))
    assert torch.allclose(ours, theirs, atol=1e-6)


def test_training_reads_the_target_as_it_is_drafted_for(tmp_path):
    np.save(tmp_path / COUNTS, np.ones(VOCAB))
    llama, granite = (target.model for target in twins())
    (_, rows, goal), (_, scaled, _) = (columns_of(each, tmp_path, MedusaPlan()) for each in (llama, granite))
    assert torch.allclose(rows, scaled, atol=1e-9) and goal.cap is None
    capped = build(config("Gemma2Config", head_dim=8, final_logit_softcapping=3.0))
    assert columns_of(capped, tmp_path, MedusaPlan())[2].cap == 3.0
