"""A model that copies from the text at hand: the mixture, the text, and what it is built around."""

import numpy as np
import pytest
import torch
from asking import begin, root_of
from methods.drafters.test_ngram import probs_of
from table_models import TableDrafter, TableTarget, hashed_laws
from texts import refused

from opt_tree import Decoder, OptTree, load_pair
from opt_tree.children import LogProbs
from opt_tree.methods.drafters.combined.copying import COPY_BETA, Copying, mixed
from opt_tree.methods.drafters.combined.grafted import Grafted
from opt_tree.methods.drafters.registry import load_drafter
from opt_tree.methods.drafters.tables.lookup import few
from opt_tree.methods.drafters.tables.ngram import Counts, NGramDrafter, Text, interpolate
from opt_tree.models.causal_lm import CausalLM


def test_the_text_first_and_the_model_for_what_it_leaves():
    """The docstring's example, over a vocabulary of four; the second row knows nothing of the text."""
    law = torch.tensor([[0.5, 0.3, 0.2, 0.0], [0.1, 0.2, 0.3, 0.4]]).log()
    one, other = map(dict, probs_of(mixed(LogProbs.of(law), few([{1: 0.6}, {}]))))
    assert one == pytest.approx({0: 0.2, 1: 0.72, 2: 0.08})
    assert other == pytest.approx({0: 0.1, 1: 0.2, 2: 0.3, 3: 0.4})


def test_what_the_model_cannot_name_is_copied_all_the_same():
    reduced = LogProbs.of(torch.zeros(1, 2), torch.tensor([3, 9]))
    (found,) = map(dict, probs_of(mixed(reduced, few([{3: 0.5, 17: 0.25}]))))
    assert found == pytest.approx({3: 0.5 + 0.125, 9: 0.125, 17: 0.25})
    (alone,) = map(dict, probs_of(mixed(LogProbs(torch.full((1, 40), -torch.inf)), few([{3: 0.5}]))))
    assert alone == pytest.approx({3: 0.5})  # a model that knows nothing leaves its share open


def test_it_answers_with_the_counts_of_this_text():
    laws = hashed_laws(3, 12)
    drafter, text = Copying(TableDrafter(laws)), [1, 2, 3, 1, 2, 3, 1, 2]
    begin(drafter, text, None)
    (found,) = map(dict, probs_of(root_of(drafter, text)))
    known = interpolate(tuple(text[-4:]), Text(Counts(4, text)), COPY_BETA)
    left = 1 - sum(known.values())
    assert known[3] > 0.1
    expected = {token: known.get(token, 0.0) + left * laws(tuple(text))[token] for token in range(12)}
    assert found == pytest.approx(expected)
    begin(drafter, [5], None)
    (alone,) = map(dict, probs_of(root_of(drafter, [5])))
    assert alone == pytest.approx(dict(enumerate(laws((5,)))))


def demo() -> CausalLM:
    return load_pair("demo", "ngram", dtype="float32").target


def test_what_was_written_is_copied_too():
    """Behind an answer it says what it says to whom prompt and answer are one prompt."""
    laws, text = hashed_laws(3, 6), [1, 2, 3, 1, 2]
    drafter, other = Copying(TableDrafter(laws)), Copying(TableDrafter(laws))
    answer = Decoder(TableTarget(hashed_laws(1, 6), 6), drafter, OptTree(4, 0.0, 3)).generate(text, 24)
    whole = text + answer.tokens
    begin(other, whole, None)
    tails = [(token,) for token in range(6)]
    assert probs_of(drafter.text.look_up(tails)) == probs_of(other.text.look_up(tails))


def test_what_does_not_go_together_is_refused():
    with pytest.raises(TypeError, match="copying takes a whole law"):
        Copying(NGramDrafter())
    refused("copy:ngram", demo(), r"copy:ngram: .* takes a whole law")


def test_a_spec_names_what_it_is_around():
    target = demo()
    drafter = load_drafter("copy:eagle:demo", target)
    assert isinstance(drafter, Copying) and drafter.drafter.temperature != 1
    assert drafter.settings["copies"] == {"beta": list(COPY_BETA), "weight": 1.0}
    grafted = load_drafter("graft:1:copy:eagle:demo+store:demo", target)
    assert isinstance(grafted, Grafted) and isinstance(grafted.drafter, Copying)
    assert not np.isnan(grafted.drafter.text.beta).any()
