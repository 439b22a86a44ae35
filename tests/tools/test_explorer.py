"""The page to step through: it parses, holds what it says of every step, and takes no token for mark-up."""

import json
import re

import pytest
import torch
import transformers
from by_hand import WORDS, generation_of, step_of, tree_of, word
from byte_tokenizer import byte_tokenizer
from pages import Page

from opt_tree import Beside, Generation, explore
from opt_tree.tools.ceiling import ceiling


@pytest.fixture(scope="module")
def tokenizer() -> transformers.PreTrainedTokenizerFast:
    return byte_tokenizer(WORDS)


@pytest.fixture
def beside() -> Beside:
    """Two steps; beside the first one a chain that the text follows to its end, and a tree that it leaves at once."""
    steps = [
        step_of(tree_of(["the", " dog", " cat", " sat"], [-1, 0, 0, 2], [1, 0.3, 0.6, 0.4]), [0, 2], "</script><b>"),
        step_of(tree_of(["</script><b>", "&amp;\u2028"], [-1, 0], [1, 0.25]), [0], " ran"),
    ]
    run = generation_of(steps)
    chain = tree_of(["the", " cat", "</script><b>"], [-1, 0, 1], [1, 0.6, 0.1])
    return Beside(
        run, [{"chain": chain, "<i>": tree_of(["the", " sat"], [-1, 0], [1, 0.1])}, {}], [{"chain": 2, "<i>": 0}, {}]
    )


def data_of(page: str) -> dict:
    return json.loads(Page(page).found["script"][0])


def test_the_page_parses_holds_its_steps_and_escapes_tokens(beside, tokenizer):
    page = explore(beside, tokenizer, {"<u>": "a & b"})
    parsed = Page(page)
    assert not {"b", "u"} & parsed.found.keys() and len(parsed.found["script"]) == 2
    assert not re.search(r"(src|href)=|@import|url\(", page)
    assert '<meta name="color-scheme" content="light dark">' in page
    assert "\u2028" not in parsed.found["script"][0]
    data = data_of(page)
    assert data["policies"] == ["this run", "chain", "<i>"]
    assert data["prefill"] == 2.0
    first, second = data["steps"]
    run = first["trees"]["this run"]
    assert [data["labels"][label] for label in run["tokens"]] == ["the", "␣dog", "␣cat", "␣sat", "</script><b>"]
    assert run["parents"] == [-1, 0, 0, 2, 2] and run["path"] == [0, 2]
    assert run["probs"] == [1, 0.3, 0.6, 0.4] and run["expected"] == 1.3
    assert run["lines"] == [1.25, 2, 0.5, 0, 1], "siblings one below the other, parents between"
    assert first["times"] == [3.0, 1.0, 4.5, 0.5, 1.0]
    assert first["kept"] == 2 and second["kept"] == 1
    assert list(second["trees"]) == ["this run"]


def test_other_trees_show_the_path_that_the_text_takes(beside, tokenizer):
    page = explore(beside, tokenizer)
    trees = data_of(page)["steps"][0]["trees"]
    assert trees["chain"]["path"] == [0, 1, 2]
    assert len(trees["chain"]["tokens"]) == 4  # and the target's own token behind it, the next of the text
    assert trees["<i>"]["path"] == [0] and trees["<i>"]["parents"] == [-1, 0, 0]
    assert "<tr><th>chain</th><td>2.00</td><td>0.70</td><td>2.00</td></tr>" in page
    assert "Means over the 1 of 2 steps" in page


def test_the_target_s_own_token_is_not_drawn_where_it_is_not_known(beside, tokenizer):
    unknown = Beside(beside.generation, beside.trees, [{}, {}])
    page = explore(unknown, tokenizer)
    trees = data_of(page)["steps"][0]["trees"]
    assert trees["chain"]["path"] is None and len(trees["chain"]["tokens"]) == 3
    assert "<td>A</td>" not in page


def test_a_generation_alone_has_no_other_policies_and_an_empty_one_no_stage(beside, tokenizer):
    page = explore(beside.generation, tokenizer)
    assert data_of(page)["policies"] == ["this run"] and "Other policies" not in page
    page = explore(Generation([word("the")], [], "stop", [], [], 0.1), tokenizer)
    assert data_of(page)["steps"] == [] and 'id="stage"' not in page


def test_ceilings_are_shown_by_step_and_row_and_those_of_another_text_refused(beside, tokenizer):
    steps = beside.generation.steps
    certain = torch.full((4, tokenizer.vocab_size + 1000), -torch.inf)
    certain[range(4), [word(" cat"), word("the"), word(" ran"), word("the")]] = 0.0
    ceilings = [ceiling(steps[0].tree, certain), ceiling(steps[1].tree, certain[:2])]
    page = explore(beside, tokenizer, ceilings=ceilings)
    first, second = data_of(page)["steps"]
    assert first["ceiling"] == 2 and first["left"] == [0, 0, 1, 0]
    assert second["ceiling"] == 1 and second["left"] == [1, 0]
    assert "1.50 tokens a step, of any verifier that is exact given these trees" in page
    assert "ceiling" not in data_of(explore(beside, tokenizer))["steps"][0]
    with pytest.raises(ValueError, match="1 ceilings for 2 steps"):
        explore(beside, tokenizer, ceilings=ceilings[:1])
