"""Heads whose files do not say which convention names their layers: the one by which they draft well is taken."""

import pytest
import torch
from methods.drafters.published_head import DEPTH, Loops, check_laws, head_weights, target_of, write_head
from tiny_models import HIDDEN, VOCAB, tiny_tokenizer

from opt_tree import load_drafter
from opt_tree.methods.drafters.heads import layer_probe
from opt_tree.methods.drafters.heads.eagle3_files import ENTERED
from opt_tree.methods.drafters.registry import DrafterOptions
from opt_tree.methods.policies.static import Static
from opt_tree.models.checkpoints import CheckpointError

pytestmark = pytest.mark.slow

IDS = [1, 3, 5]


def head_of(folder, states, ids=IDS):
    """A head whose `fc` makes the target's own next token of these of hs[0], ..., and of no others."""
    weights, target = head_weights(), target_of()
    for name in ("midlayer.self_attn.o_proj.weight", "midlayer.mlp.down_proj.weight"):
        weights[name] = torch.zeros_like(weights[name])
    weights["norm.weight"] = torch.ones(HIDDEN).double()
    weights["lm_head.weight"] = torch.nn.functional.normalize(torch.randn(VOCAB, HIDDEN), dim=1).double()
    text = layer_probe._ids(target, None)
    with torch.no_grad():
        out = target.model(text, output_hidden_states=True, use_cache=False)
    read = torch.cat([out.hidden_states[one][0] for one in states], -1)[:-1]
    wanted = weights["lm_head.weight"][out.logits[0].argmax(-1)[1:]]
    weights["fc.weight"] = torch.linalg.lstsq(read, wanted).solution.T
    return write_head(folder, weights, None, draft_vocab_size=VOCAB, eagle_config={ENTERED: ids})


@pytest.mark.parametrize(
    ("ids", "states", "says"),
    [
        (IDS, [2, 4, 6], "named by what leaves them"),
        (IDS, [1, 3, 5], "named by what enters them"),
        ([2, 4, 6], [2, 4, 6], "named by what enters them"),
        ([2, 4, 6], [3, 5, 7], "named by what leaves them"),
    ],
    ids=str,
)
def test_the_reading_that_drafts_well_is_taken(tmp_path, ids, states, says):
    folder = head_of(tmp_path / "head", states, ids)
    target = target_of()
    drafter = load_drafter(f"eagle:{folder}", target)
    assert drafter.features == tuple(one - 1 for one in states)
    own, other = drafter.probed.agreed
    assert drafter.probed.clear and own > 2 * other and own / drafter.probed.rows > 0.5
    assert (
        says in drafter.describe() and f"({own / drafter.probed.rows:.0%} of first tokens agree" in drafter.describe()
    )
    assert "too near" not in drafter.describe()


def test_the_probe_s_numbers_are_those_of_the_layer_written_with_loops(tmp_path, monkeypatch):
    monkeypatch.setattr(layer_probe, "_MOST", 14)
    weights, target = head_weights(), target_of()
    folder = write_head(tmp_path / "head", weights, eagle_config={ENTERED: IDS})
    probed = load_drafter(f"eagle:{folder}", target).probed
    text = layer_probe._ids(target, None)
    best = target.model(text, use_cache=False).logits[0].argmax(-1).tolist()
    for states, agreed in zip(([2, 4, 6], [1, 3, 5]), probed.agreed, strict=True):
        loops, ids = Loops(weights, states), text[0].tolist()
        first = [int(loops.law(ids[: i + 2], []).argmax()) * 2 + 1 for i in range(len(ids) - 1)]
        assert agreed == sum(one == two for one, two in zip(first, best[1:], strict=True))


def test_where_nothing_is_clear_the_rule_stays(tmp_path):
    folder = write_head(tmp_path / "head", head_weights(), eagle_config={ENTERED: IDS})
    drafter = load_drafter(f"eagle:{folder}", target_of())
    assert drafter.features == tuple(IDS) and not drafter.probed.clear
    assert "too near to tell: SGLang's rule" in drafter.describe()


@pytest.mark.parametrize(
    "settings",
    [{ENTERED: IDS}, {"eagle_config": {ENTERED: IDS, "eagle_aux_layer_semantics": "vllm"}}, {}],
    ids=["top level", "semantics", "no list"],
)
def test_a_file_that_says_it_is_believed(tmp_path, settings):
    folder = write_head(tmp_path / "head", head_weights(), **settings)
    drafter = load_drafter(f"eagle:{folder}", target_of())
    assert drafter.probed is None and "named by" not in drafter.describe()


def test_layers_that_are_asked_for_are_not_probed(tmp_path):
    folder = head_of(tmp_path / "head", [1, 3, 5])
    target = target_of()
    drafter = load_drafter(f"eagle:{folder}", target, DrafterOptions(layers=(1, 3, 5)))
    assert drafter.features == (1, 3, 5) and drafter.probed is None
    check = write_head(tmp_path / "x", head_weights(), eagle_config={ENTERED: IDS})
    drafter = load_drafter(f"eagle:{check}", target, DrafterOptions(layers=(0, 2, DEPTH - 1)))
    check_laws(drafter, target, Loops(head_weights(), [1, 3, DEPTH]), Static.chain(4))
    with pytest.raises(CheckpointError, match=r"fc\.weight reads 3 states, and these are 2 layers"):
        load_drafter(f"eagle:{folder}", target, DrafterOptions(layers=(1, 3)))


def test_the_text_is_the_tokenizer_s(tmp_path):
    target = target_of()
    known = layer_probe._ids(target, tiny_tokenizer())[0].tolist()
    assert known == tiny_tokenizer()(layer_probe.TEXT).input_ids[: len(known)] and len(known) > 20
