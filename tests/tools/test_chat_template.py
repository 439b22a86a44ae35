"""Chat templates: parts where they take parts only, one line where they refuse, never a prompt without its question."""

import copy

import pytest
from tiny_models import tiny_tokenizer

from evaluation.questions.prompts import Prompter
from opt_tree import Stop
from opt_tree.tools.chat_template import render
from opt_tree.tools.pair import encode
from opt_tree.training.answers import opening

TEXT = "{% for m in messages %}{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}aa{% endif %}"
PARTS = (
    "{% for m in messages %}{% for c in m['content'] %}{% if c['type'] == 'text' %}{{ c['text'] }}{% endif %}"
    "{% endfor %}{% endfor %}{% if add_generation_prompt %}aa{% endif %}"
)
REFUSED = {
    "no system": ("{{ raise_exception('System role not supported') }}", "TemplateError: System role not supported"),
    "undefined": ("{{ messages[0]['name'] + 'x' }}", "UndefinedError: 'dict object' has no attribute 'name'"),
    "syntax": ("{% for %}", "TemplateSyntaxError: Expected an expression"),
}


def tokenizer(template):
    its = copy.deepcopy(tiny_tokenizer())
    its.chat_template = template
    return its


@pytest.mark.parametrize("template", [TEXT, PARTS, "{{ messages[0]['content'][0]['text'] + '' }}aa"], ids=str)
def test_the_question_is_in_every_prompt(template):
    its = tokenizer(template)
    expected = its("bcdaaa").input_ids
    assert encode(its, "bcda") == expected == Prompter(its, Stop()).encode(["bcda"], [])
    assert opening(its) == (its("aa").input_ids if "add_generation_prompt" in template else [])


def test_text_is_given_as_text_where_it_is_taken_and_parts_stay_parts():
    shown = tokenizer("{{ messages }}")
    assert "'content': 'bcda'" in render(shown, [{"role": "user", "content": "bcda"}])
    given = [{"role": "user", "content": [{"type": "text", "text": "bcda"}]}]
    assert render(tokenizer(PARTS), given) == "bcdaaa"


@pytest.mark.parametrize("name", REFUSED)
def test_a_refusal_is_one_line(name):
    template, line = REFUSED[name]
    for ask in (lambda its: encode(its, "bcda"), lambda its: Prompter(its, Stop()), opening):
        with pytest.raises(ValueError, match="the chat template refuses these messages: ") as error:
            ask(tokenizer(template))
        assert line in str(error.value) and "\n" not in str(error.value)


def test_a_template_without_the_question_is_refused():
    for ask in (lambda its: encode(its, "bcda"), lambda its: Prompter(its, Stop())):
        with pytest.raises(ValueError, match="leaves the last message out of the prompt"):
            ask(tokenizer("aa{{ messages[0]['role'] }}"))
