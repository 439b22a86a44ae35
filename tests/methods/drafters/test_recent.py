"""A draft model that reads the end of a long prompt: what it is shown, what that costs, what is refused."""

import pytest
from asking import begin, root_of, tiny_lm_drafter
from texts import refused
from tiny_models import prompt, save_pair, tiny, tiny_head

from opt_tree import Decoder, OptTree, load_drafter
from opt_tree.draft_model import CausalLMDrafter
from opt_tree.methods.drafters.combined.recent import FIRST, Recent
from opt_tree.methods.drafters.heads.eagle import EagleDrafter
from opt_tree.methods.drafters.registry import folders_of
from opt_tree.models.causal_lm import CausalLM
from opt_tree.tools.presets import plain

POLICY = OptTree(nodes=6, threshold=0.0, max_depth=3)
READ = 12


def decoder_of(drafter):
    return Decoder(CausalLM(tiny("llama")), drafter, POLICY)


def shown(text):
    return text[:FIRST] + text[FIRST - READ :]


@pytest.mark.parametrize("length", [3, READ, READ + 1, 40])
def test_it_says_what_its_drafter_says_of_a_shorter_text(length):
    whole, recent = tiny_lm_drafter(), Recent(tiny_lm_drafter(), READ)
    text = prompt(length)
    short = shown(text) if length > READ else text
    begin(recent, text)
    begin(whole, short)
    assert root_of(recent, text).values.equal(root_of(whole, short).values)
    assert recent.work.tokens == min(length, READ)
    more = prompt(3, seed=1)
    assert root_of(recent, text + more).values.equal(root_of(whole, short + more).values)


def test_the_text_is_the_target_s_and_the_prompt_is_cheap():
    text, own = prompt(60), plain(CausalLM(tiny("llama")))
    made = {one: decoder_of(one).generate(text, 12) for one in (tiny_lm_drafter(), Recent(tiny_lm_drafter(), READ))}
    whole, recent = made.values()
    assert recent.tokens == whole.tokens == own.generate(text, 12).tokens
    assert whole.steps[0].draft_tokens - recent.steps[0].draft_tokens == len(text) - READ


def test_a_text_that_goes_on_is_read_on_unless_much_of_it_is_new():
    drafter, text, read = Recent(tiny_lm_drafter(), READ), prompt(60), []
    for more in ([], prompt(5, seed=1), prompt(30, seed=2), prompt(2, seed=3)):
        text, kept, before = text + more, len(text) if more else 0, drafter.work.tokens
        begin(drafter, text, kept=kept)
        answer = root_of(drafter, text)
        read.append(drafter.work.tokens - before)
    assert read == [READ, 5, READ - FIRST, 2]
    other = tiny_lm_drafter()
    begin(other, shown(text[:-2]) + text[-2:])
    assert answer.values.allclose(root_of(other, shown(text[:-2]) + text[-2:]).values, atol=1e-12)
    begin(drafter, text)
    before = drafter.work.tokens
    root_of(drafter, text)
    assert drafter.work.tokens - before == READ


@pytest.mark.parametrize("length", [FIRST + 1, READ, 55, 62])
def test_a_shorter_text_that_begins_alike_is_shown_anew(length):
    drafter, other, text = Recent(tiny_lm_drafter(), READ), tiny_lm_drafter(), prompt(70)
    begin(drafter, text)
    root_of(drafter, text)
    begin(drafter, text[:length], kept=FIRST)
    short = text[:length] if length <= READ else shown(text[:length])
    begin(other, short)
    for more in ([], [3, 4]):
        mine, whole = root_of(drafter, text[:length] + more), root_of(other, short + more)
        assert mine.values.allclose(whole.values, atol=1e-12)


def test_a_conversation_is_the_same_with_its_rows_kept():
    decoder, anew = decoder_of(Recent(tiny_lm_drafter(), READ)), plain(CausalLM(tiny("llama")))
    text = prompt(40)
    for seed in (1, 2):
        answer = decoder.generate(text, 8, reuse=True)
        assert answer.tokens == anew.generate(text, 8).tokens
        assert bool(answer.reused) == (seed > 1)
        text = text + answer.tokens + prompt(6, seed=seed)


def test_it_drafts_behind_the_draft_model_s_own_end():
    drafter = tiny_lm_drafter()
    drafter.max_context = 30
    text = prompt(60)
    assert not any(step.tree.nodes for step in decoder_of(drafter).generate(text, 6).steps)
    recent = Recent(drafter, READ)
    assert all(step.tree.nodes for step in decoder_of(recent).generate(text, 6).steps[:-1])
    assert recent.room(len(text)) == 30 - READ and recent.max_context == 30 + len(text) - READ


def test_its_calibration_is_its_drafter_s():
    recent = Recent(tiny_lm_drafter(), READ).calibrated(0.5)
    assert recent.drafter.temperature == 0.5 and recent.settings["sharpening"] == 0.5
    assert "temperature 0.50" in recent.describe() and f"reading {READ} tokens" in recent.describe()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_pair(tmp_path_factory.mktemp("pair"))


def test_it_is_loaded_by_its_spec(folder):
    target = CausalLM(tiny("llama"))
    loaded = load_drafter(f"recent:64:lm:{folder}/draft", target)
    assert isinstance(loaded, Recent) and loaded.most == 64 and isinstance(loaded.drafter, CausalLMDrafter)
    assert folders_of(f"recent:64:lm:{folder}/draft") == [f"{folder}/draft"]
    refused("recent:few:ngram", target, "how many tokens of a prompt a model reads")
    refused("recent:64:ngram", target, "runs no model")
    refused(f"recent:{FIRST}:lm:{folder}/draft", target, f"{FIRST} are too few")


def test_what_reads_the_target_is_shown_everything():
    target = CausalLM(tiny("llama"))
    with pytest.raises(TypeError, match="is shown all of it"):
        Recent(EagleDrafter(tiny_head(target.model), target), READ)
