"""Transcripts, drawn trees and pages on trees made by hand and a tokenizer whose tokens are single bytes."""

import html
import os
import re
import sys
from types import SimpleNamespace

import pytest
import tokenizers
import transformers
from by_hand import WORDS, generation_of, step_of, tree_of, word
from byte_tokenizer import STOP, byte_tokenizer
from pages import Page

from opt_tree import Tree, explore
from opt_tree.tools.display.notebook import in_notebook, rich
from opt_tree.tools.display.page import asked, summary, telling_steps, to_html
from opt_tree.tools.display.transcripts import VISIBLE, IncrementalText, pieces, token_label, transcript, wants_color
from opt_tree.tools.display.trees import draw_tree, escape


@pytest.fixture(scope="module")
def tokenizer() -> transformers.PreTrainedTokenizerFast:
    return byte_tokenizer(WORDS)


@pytest.fixture
def tree() -> Tree:
    """the -> cat (.6) -> sat (.4), ran (.1); the -> dog (.3). Stored so that the better sibling is not the first."""
    return tree_of(["the", " dog", " cat", " ran", " sat"], [-1, 0, 0, 2, 2], [1, 0.3, 0.6, 0.1, 0.4])


def test_a_drawn_tree_lists_the_best_sibling_first_and_stars_the_path(tokenizer, tree):
    assert draw_tree(tree, tokenizer, path=[0, 2, 4]).splitlines() == [
        "the    4 nodes, E(A) 1.40, accepted 2 (*)",
        "├─ ␣cat 0.60 *",
        "│  ├─ ␣sat 0.40 *",
        "│  └─ ␣ran 0.10",
        "└─ ␣dog 0.30",
    ]
    assert "*" not in draw_tree(tree, tokenizer)
    assert draw_tree(tree_of([word("the")], [-1], [1.0]), tokenizer) == "the    0 nodes, E(A) 0.00"


def test_a_chain_deeper_than_the_recursion_limit_is_drawn(tokenizer):
    rows = 1500
    chain = tree_of([word(" cat")] * rows, list(range(-1, rows - 1)), [1.0] * rows)
    assert len(draw_tree(chain, tokenizer).splitlines()) == rows
    step = step_of(chain, [0], word(" sat"))
    assert to_html(generation_of([step]), tokenizer, steps=[0]).count("<circle") == rows + 1


@pytest.mark.parametrize(("text", "label"), [(" cat", "␣cat"), ("\n", "↵"), ("\x1b[31m", "␛[31m"), ("<b>&", "<b>&")])
def test_token_labels_fit_on_a_line(tokenizer, text, label):
    assert token_label(tokenizer, word(text)) == label


def test_what_is_no_text_is_labelled_by_its_number_or_its_name(tokenizer):
    first = tokenizer("☃").input_ids[0]
    assert token_label(tokenizer, first) == f"#{first}"
    assert token_label(tokenizer, tokenizer.eos_token_id) == STOP


def test_the_transcript_tells_drafted_from_own_tokens(tokenizer, tree):
    generation = generation_of([step_of(tree, [0, 2, 4], word(" ran")), step_of(tree, [0], word("\n"))])
    assert transcript(generation, tokenizer, color=False) == "[ cat sat] ran\n"
    assert transcript(generation, tokenizer, color=True) == "\x1b[36m cat sat\x1b[0m ran\n"
    assert "\x1b" not in transcript(generation, tokenizer), "standard output is no terminal here"
    assert [(piece.text, piece.drafted, piece.step) for piece in pieces(generation, tokenizer)] == [
        (" cat sat", True, 0),
        (" ran", False, 0),
        ("\n", False, 1),
    ]
    cut = generation_of([step_of(tree, [0, 2, 4], word(" ran"))], kept=1)
    assert transcript(cut, tokenizer, color=False) == "[ cat]", "it ends inside an accepted path"
    assert "1 in 1 step, 1 of them drafted" in summary(cut)["tokens"]
    ended = generation_of([step_of(tree, [0], tokenizer.eos_token_id)])
    assert transcript(ended, tokenizer, color=False) == "", "a stop token is not shown"


def test_control_characters_of_the_model_do_not_reach_the_terminal(tokenizer, tree):
    generation = generation_of([step_of(tree, [0], word("\x1b[31m"))])
    for text in (transcript(generation, tokenizer, color=False), to_html(generation, tokenizer)):
        assert "\x1b" not in text
        assert "␛[31m" in text


def test_a_character_split_over_two_steps_goes_to_its_last_token(tokenizer, tree):
    start, middle, last = tokenizer("☃").input_ids
    drafted = tree_of([word("the"), start], [-1, 0], [1, 0.5])
    generation = generation_of(
        [step_of(drafted, [0, 1], middle), step_of(tree_of([middle, last], [-1, 0], [1, 0.5]), [0, 1], word(" sat"))]
    )
    assert transcript(generation, tokenizer, color=False) == "[☃] sat"
    assert "☃" in to_html(generation, tokenizer)
    never_whole = generation_of([step_of(tree, [0, 2], start)])
    assert transcript(never_whole, tokenizer, color=False) == "[ cat]\ufffd"


@pytest.mark.parametrize("text", ["naïve ☃ 🙂 Ünïcödé\n\ttab", " leading space", "🙂🙂"])
def test_incremental_text_is_the_decoded_text(tokenizer, text):
    decoder = IncrementalText(tokenizer)
    tokens = tokenizer(text).input_ids
    assert "".join([*(decoder.add(token) for token in tokens), decoder.rest()]) == text


def test_incremental_text_keeps_the_space_behind_a_special_token():
    """With sentencepiece, whose decoder drops the space of a text's first word: a special token alone begins none."""
    vocab = {"</s>": 0, "▁the": 1, "▁cat": 2, "s": 3}
    built = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="</s>"))
    built.decoder = tokenizers.decoders.Metaspace()
    words = transformers.PreTrainedTokenizerFast(tokenizer_object=built, eos_token="</s>")
    for tokens in ([1, 0, 2, 3], [0, 0, 1, 0, 0, 2], [1, 2, 0, 3, 1]):
        decoder = IncrementalText(words)
        whole = words.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert "".join([*(decoder.add(token) for token in tokens), decoder.rest()]) == whole


def test_the_page_is_whole_self_contained_and_escaped(tokenizer, tree):
    steps = [step_of(tree, [0, 2, 4], word("<b>&")), step_of(tree, [0], word("\n"))]
    page = to_html(generation_of(steps, prompt=[word("<b>&")]), tokenizer, facts={"<i>": "a & b"})
    parsed = Page(page)
    assert "b" not in parsed.found  # the model's mark-up stayed text
    assert '<meta name="color-scheme" content="light dark">' in page  # scroll bars follow, too
    assert " cat sat<b>&" in parsed.text and "<i>" in parsed.text and "a & b" in parsed.text
    assert not re.search(r"(src|href)=|@import|url\(", page)
    assert "step 1: A 2, E(A) 1.40, 4 nodes, 10.0 ms" in parsed.titles
    assert "step 2: A 0, E(A) 1.40, 4 nodes, 10.0 ms" in parsed.titles
    assert html.escape("<b>&") in page
    assert "prefers-color-scheme: dark" in page


def test_the_turns_of_a_prompt_stand_apart(tokenizer, tree):
    special = tokenizer.all_special_ids[0]
    prompt = [special, special, word("the"), special, word(" cat"), word("\n"), special, word("<b>&"), special]
    assert asked(prompt, tokenizer) == "the\ncat\n<b>&"
    generation = generation_of([step_of(tree, [0], word("\n"))], prompt=prompt)
    pages = to_html(generation, tokenizer), explore(generation, tokenizer)
    assert all(f'<p class="prompt">{escape(asked(prompt, tokenizer))}</p>' in page for page in pages)


def test_every_style_is_scoped_so_that_a_notebook_keeps_its_own(tokenizer, tree):
    page = to_html(generation_of([step_of(tree, [0], word("\n"))]), tokenizer)
    style = page.split("<style>")[1].split("</style>")[0]
    for selectors in re.findall(r"([^{}]+)\{", style.replace("@media (prefers-color-scheme: dark) {", "")):
        assert all(".opt-tree" in selector for selector in selectors.split(",")), selectors


def test_a_drawing_has_a_disc_per_row_and_the_targets_own_token(tokenizer, tree):
    page = to_html(generation_of([step_of(tree, [0, 2], word(" ran"))]), tokenizer, steps=[0])
    figure = page.split("<figure>")[1]
    assert figure.count("<circle") == len(tree) + 1
    assert figure.count('<path class="drafted"') == 1  # the accepted edge
    assert figure.count('<path class="own"') == 1
    assert "␣cat: path probability 0.600, 0.600 after its parent" in figure
    assert "␣sat: path probability 0.400, 0.667 after its parent" in figure
    coordinates = [float(value) for value in re.findall(r'c[xy]="([^"]+)"', figure)]
    width, height = (float(value) for value in re.search(r'viewBox="0 0 (\S+) (\S+)"', figure).groups())
    assert min(coordinates) > 0
    assert max(coordinates[::2]) < width and max(coordinates[1::2]) < height


def test_nothing_is_drawn_behind_the_end(tokenizer, tree):
    """The target's own token of a step that was cut is not of the text."""
    ended = generation_of([step_of(tree, [0, 2], word(" ran"))], kept=1)
    figure = to_html(ended, tokenizer, steps=[0]).split("<figure>")[1]
    assert figure.count("<circle") == len(tree) and 'class="own"' not in figure
    assert figure.count('<path class="drafted"') == 1
    drawn = ",".join(map(str, range(len(tree))))
    assert f'"tokens":[{drawn}],' in explore(ended, tokenizer)


def test_the_telling_steps_are_the_best_the_median_and_the_worst(tokenizer, tree):
    small = tree_of([word("the"), word(" cat")], [-1, 0], [1, 0.6])
    empty = tree_of([word("the")], [-1], [1.0])
    own = word(" ran")
    steps = [
        step_of(small, [0], own),
        step_of(tree, [0], own),
        step_of(small, [0, 1], own),
        step_of(tree, [0, 2, 4], own),
        step_of(tree, [0, 2], own),
        step_of(empty, [0], own),
    ]
    assert telling_steps(generation_of(steps)) == [3, 2, 1]
    assert telling_steps(generation_of(steps[-1:])) == []
    assert "<figure>" not in to_html(generation_of(steps[-1:]), tokenizer)
    with pytest.raises(ValueError, match="no step 3: the generation has 1 step"):
        to_html(generation_of(steps[-1:]), tokenizer, steps=[3])


def test_a_notebook_shows_trees_steps_and_generations_with_numbers_for_tokens(tokenizer, tree):
    step = step_of(tree, [0, 2], word(" ran"))
    for shown, discs, said in (
        (tree, 5, "4 nodes, 2 layers, E(A) 1.40"),
        (step, 6, "A 1, E(A) 1.40, 4 nodes, 10.0 ms"),
    ):
        fragment = shown._repr_html_()
        assert fragment.count("<circle") == discs and said in fragment
        assert f"#{word(' cat')}" in fragment
        assert "␣cat" in rich(shown, tokenizer)
    fragment = generation_of([step])._repr_html_()
    assert f">#{word(' cat')}</span>" in fragment.replace("> #", ">#") and "tokens per step" in fragment
    assert "<script" not in fragment and "<svg" not in fragment


def test_in_notebook_is_for_notebooks(tokenizer):
    with pytest.raises(RuntimeError, match="this is no notebook"):
        in_notebook(tokenizer)


@pytest.mark.parametrize("sign", ["\u202e", "\u202a", "\u2066", "\u2069"])
def test_what_turns_the_direction_of_writing_becomes_a_sign(sign: str) -> None:
    """Else the rest of a line would stand in another order than it was emitted."""
    assert f"a{sign}b".translate(VISIBLE) == "a\ufffdb"


@pytest.mark.parametrize(
    ("terminal", "variables", "color"),
    [
        (True, {}, True),
        (False, {}, False),
        (True, {"NO_COLOR": "1"}, False),
        (True, {"NO_COLOR": ""}, True),
        (True, {"TERM": "dumb"}, False),
    ],
)
def test_colours_are_for_terminals_that_take_them(monkeypatch, tokenizer, tree, terminal, variables, color):
    monkeypatch.setattr(os, "environ", {"TERM": "xterm"} | variables)
    monkeypatch.setattr(sys, "stdout", SimpleNamespace(isatty=lambda: terminal))
    assert wants_color(sys.stdout) is color
    generation = generation_of([step_of(tree, [0, 2, 4], word(" ran"))])
    assert ("\x1b" in transcript(generation, tokenizer)) is color
