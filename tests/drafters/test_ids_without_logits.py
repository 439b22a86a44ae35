"""Ids that a target reads and never writes, such as an image's place: its input layer has more rows than its output."""

import copy

import pytest
import torch
from drafters.every_kind import MAKERS, VARIANTS, target_model
from tiny_models import VOCAB, prompt

from opt_tree import Decoder, OptTree, Sampling, Static
from opt_tree.models.causal_lm import CausalLM
from opt_tree.models.chain_lm import ChainLM
from opt_tree.training.heads import eagle, eagle3

NEW_TOKENS = 20
READ_ONLY = VOCAB + 2


def model():
    """The target of every drafter here, with five more rows in its input layer."""
    made = copy.deepcopy(target_model())
    torch.manual_seed(0)
    made.model.embed_tokens = torch.nn.Embedding(VOCAB + 5, made.config.hidden_size, dtype=made.dtype)
    return made


def ids(place):
    tokens = prompt(24)
    tokens[3] = tokens[11] = READ_ONLY - 1
    tokens[place] = READ_ONLY
    return tokens


@pytest.mark.parametrize("place", [7, -1])
@pytest.mark.parametrize("name", [*MAKERS, *VARIANTS])
def test_a_prompt_with_ids_that_have_no_logit_is_decoded_as_transformers_does(name, place):
    made, given = model(), torch.tensor([ids(place)])
    plain = made.generate(
        given, attention_mask=torch.ones_like(given), max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None
    )
    target = CausalLM(made)
    decoder = Decoder(target, (MAKERS | VARIANTS)[name](target), OptTree(8, 0.0, 4))
    for _ in range(2):  # tables learn from the first
        assert decoder.generate(ids(place), NEW_TOKENS, stop=None).tokens == plain[0, 24:].tolist()
    assert decoder.generate(ids(place), NEW_TOKENS, reuse=True, stop=None).tokens == plain[0, 24:].tolist()


def test_path_by_path_with_sampling_and_what_no_layer_knows():
    lm, other = ChainLM(model()), CausalLM(model())
    drafted = Decoder(lm, MAKERS["ngram"](lm), Static.chain(3)).generate(ids(7), 12, Sampling(0.8), seed=3)
    assert drafted.tokens == Decoder(other, None, Static.empty()).generate(ids(7), 12, Sampling(0.8), seed=3).tokens
    for target in (lm, other):
        with pytest.raises(ValueError, match=f"token {VOCAB + 5} is outside the vocabulary of {VOCAB + 5}"):
            Decoder(target, None, Static.empty()).generate([1, VOCAB + 5], 4)


def test_a_new_head_has_the_embeddings_that_can_be_drafted():
    made = model()
    for head in (eagle.new_head(made), eagle3.new_eagle3_head(made, VOCAB)):
        assert torch.equal(head.embed_tokens.weight, made.model.embed_tokens.weight[:VOCAB].float())
