"""ParallelSpec: what the masks see and read, the texts, the draft vocabulary, and the files."""

import json

import pytest
import torch
from safetensors.torch import save_file
from texts import refused
from tiny_models import ARCHITECTURES, VOCAB, build, prompt, tiny, tiny_head

from opt_tree import Decoder, OptTree, Static, load_drafter
from opt_tree.methods.controllers.scheduled import Scheduled
from opt_tree.methods.drafters.draft_vocabulary import vocabulary_tensors
from opt_tree.methods.drafters.heads import parallel_spec
from opt_tree.methods.drafters.heads.parallel_spec import ParallelHead, ParallelSpecDrafter
from opt_tree.models.causal_lm import CausalLM

DEPTHS = 4
SOME = torch.arange(VOCAB - 1, 0, -2)
"""A draft vocabulary, in falling order."""
POLICY = OptTree(nodes=9, threshold=0.0, max_depth=6)


def target_of():
    return CausalLM(build(ARCHITECTURES["llama"]()))


def head_of(target):
    own = tiny_head(target.model)
    head = ParallelHead(own.config, DEPTHS)
    with torch.random.fork_rng():
        torch.manual_seed(5)
        torch.nn.init.normal_(head.masks.weight, std=0.5)
    head.load_state_dict(own.state_dict() | {"masks.weight": head.masks.weight.detach().clone()})
    return head.double().eval().requires_grad_(False)


def drafter_of(target, tokens=None):
    return ParallelSpecDrafter(head_of(target), target, tokens=tokens)


def recorded(drafter, monkeypatch):
    """What is said of every depth, of every context that is drafted for."""
    root, answer, asked, found = drafter.root, drafter.answer, [], {}

    def noted(context):
        asked.append(tuple(context))
        return root(context)

    def kept(scores):
        first = answer(scores)
        found[asked[-1]] = drafter.answers.values.clone()
        return first

    monkeypatch.setattr(drafter, "root", noted)
    monkeypatch.setattr(drafter, "answer", kept)
    return found


def expected(head, context):
    """The laws behind a context, a row at a time: each mask in a forward of its own, over the pairs and its masks."""
    model = tiny("llama")
    ids = torch.tensor([context])
    features = model.base_model(ids[:, :-1], use_cache=False).last_hidden_state
    laws = []
    for masks in range(DEPTHS):
        own = torch.tensor([[VOCAB + mask for mask in range(masks)]], dtype=torch.long)
        tokens = torch.cat([ids[:, 1:], own], 1)
        given = torch.cat([features, features[:, -1:].expand(-1, masks, -1)], 1)
        seen = torch.full((tokens.shape[1],) * 2, -torch.inf).double().triu(1)[None, None]
        (states,) = head(tokens, given, torch.arange(tokens.shape[1])[None], attention_mask=seen)
        laws.append(model.get_output_embeddings()(states[0, -1]))
    return torch.stack(laws)


@pytest.mark.parametrize("pairs", [512, 3])
def test_a_mask_sees_the_true_pairs_and_the_masks_before_it(pairs, monkeypatch):
    """What a step's one forward says, over steps that accept and steps that do not, is what fresh forwards say."""
    monkeypatch.setattr(parallel_spec, "_PAIRS", pairs)
    target = target_of()
    drafter = drafter_of(target)
    found = recorded(drafter, monkeypatch)
    for text in (prompt(6), prompt(5) * 6):
        accepted = Decoder(target, drafter, OptTree(30, 0.0)).generate(text, 12).steps
        assert len(accepted) > 2
    assert len(found) > 8
    for context, laws in found.items():
        assert torch.allclose(laws, expected(head_of(target), list(context)).log_softmax(-1), atol=1e-9)


def test_a_step_without_a_draft_is_caught_up_with(monkeypatch):
    text, target = prompt(8), target_of()
    drafter = drafter_of(target)
    found = recorded(drafter, monkeypatch)
    policies = [OptTree(4, 0.0), *[Static.empty()] * 3, OptTree(4, 0.0), OptTree(4, 0.0)]
    Decoder(target, drafter, Scheduled(policies)).generate(text, 12)
    assert len(found) >= 3
    for context, laws in found.items():
        assert torch.allclose(laws, expected(head_of(target), list(context)).log_softmax(-1), atol=1e-9)


def test_a_draft_vocabulary_holds_for_every_depth(monkeypatch):
    target = target_of()
    drafter = drafter_of(target, SOME)
    found = recorded(drafter, monkeypatch)
    Decoder(target, drafter, POLICY).generate(prompt(8), 8)
    assert drafter.tokens.tolist() == SOME.tolist()[::-1]
    for context, laws in found.items():
        whole = expected(head_of(target), list(context))
        assert torch.allclose(laws, whole[:, SOME.flip(0)].log_softmax(-1), atol=1e-9)


class TestFiles:
    def write(self, folder, target, drop=(), **changes):
        head = head_of(target)
        tensors = {n: t.float() for n, t in head.state_dict().items() if n not in ("embed_tokens.weight", *drop)}
        save_file(tensors | changes, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(head.config.to_diff_dict()))
        return f"parallelspec:{folder}"

    def test_it_is_loaded_by_its_spec(self, tmp_path):
        target = target_of()
        changes = vocabulary_tensors(SOME, VOCAB)
        drafter = load_drafter(self.write(tmp_path, target, **changes), target)
        assert drafter.tokens.tolist() == SOME.tolist()[::-1]
        assert f"{DEPTHS} layers a pass, {len(SOME)} tokens of {VOCAB}" in drafter.describe()
        text = Decoder(target, drafter, POLICY).generate(prompt(6), 10).tokens
        assert text == Decoder(target_of(), None, Static.empty()).generate(prompt(6), 10).tokens

    @pytest.mark.parametrize(
        ("drop", "changes", "complaint"),
        [
            (("masks.weight",), {}, "is no parallel head: it has no masks.weight"),
            (("fc.weight",), {}, "missing fc.weight"),
            ((), {"masks.weight": torch.zeros(3, 7)}, r"masks.weight is \(3, 7\), expected \(3, 32\)"),
            ((), {"d2t": torch.tensor([0, 9000])}, "d2t leads to tokens 0 to 9001"),
        ],
    )
    def test_what_is_none_is_one_line(self, tmp_path, drop, changes, complaint):
        target = target_of()
        spec = self.write(tmp_path, target, drop, **changes)
        refused(spec, target, complaint)
