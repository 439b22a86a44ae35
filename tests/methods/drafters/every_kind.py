"""Every kind of drafter on a tiny target, made from scratch: what all of them must do is tested over these."""

import copy
import functools
from collections.abc import Callable
from typing import Any

from asking import tiny_lm_drafter
from methods.drafters.test_blocks import block_of, dspark_of
from methods.drafters.test_eagle3 import KNOWN, tiny_head3
from methods.drafters.test_early_exit import deep, exit_of
from methods.drafters.test_one_pass import medusa
from methods.drafters.test_other_vocabulary import unlike
from methods.drafters.test_parallel_spec import SOME
from methods.drafters.test_parallel_spec import drafter_of as parallel_spec
from methods.drafters.test_store import documents
from tiny_models import VOCAB, prompt, tiny_drafter, tiny_head
from transformers import PreTrainedModel

from opt_tree.draft_model import CausalLMDrafter
from opt_tree.drafter import Drafter
from opt_tree.methods.drafters.combined.copying import Copying
from opt_tree.methods.drafters.combined.grafted import Grafted
from opt_tree.methods.drafters.combined.rasd import Rasd
from opt_tree.methods.drafters.combined.recent import Recent
from opt_tree.methods.drafters.heads.eagle import EagleDrafter
from opt_tree.methods.drafters.heads.eagle3 import Eagle3Drafter
from opt_tree.methods.drafters.heads.early_exit import EarlyExit
from opt_tree.methods.drafters.registry import KINDS, DrafterOptions
from opt_tree.methods.drafters.small_models.chain_lm import ChainLMDrafter
from opt_tree.methods.drafters.small_models.trimmed import TrimmedDrafter
from opt_tree.methods.drafters.tables.ngram import NGramDrafter
from opt_tree.methods.drafters.tables.recycling import TokenRecycling
from opt_tree.methods.drafters.tables.store import Store, StoreDrafter
from opt_tree.models.causal_lm import CausalLM
from opt_tree.models.chain_lm import ChainLM
from opt_tree.training.fitting.store import Recipe, build


@functools.cache
def target_model() -> PreTrainedModel:
    """The model of every target here; one object, which drafters hook."""
    return deep()


def small(target: Any = None) -> CausalLMDrafter:
    return tiny_lm_drafter()


def head(target: CausalLM) -> EagleDrafter:
    return EagleDrafter(tiny_head(target.model), target)


def store(**options: Any) -> StoreDrafter:
    text = documents(prompt(500), prompt(60, seed=1), prompt(20) * 3)
    return StoreDrafter(Store(build(text, Recipe(VOCAB, order=3))), **options)


Make = Callable[[Any], Drafter]
MAKERS: dict[str, Make] = {
    "lm": small,
    "lm, path by path": lambda target: ChainLMDrafter(ChainLM(tiny_drafter("llama")), VOCAB),
    "lm, of another tokenizer": unlike,
    "eagle": lambda target: head(target).calibrated(0.7),
    "eagle3": lambda target: Eagle3Drafter(tiny_head3(target), target, tokens=KNOWN, layers=(0, 1, 2)),
    "exit": lambda target: EarlyExit(exit_of(target), target),
    "medusa": medusa,
    "parallelspec": parallel_spec,
    "dspark": lambda target: dspark_of(target, layers=(0, 1)),
    "dflash": lambda target: block_of(target, (0, 1)),
    "ngram": lambda target: NGramDrafter(),
    "store": lambda target: store(),
    "recycling": lambda target: TokenRecycling(VOCAB),
    "graft": lambda target: Grafted(head(target), NGramDrafter(), 2),
    "copy": lambda target: Copying(head(target)),
    "rasd": lambda target: Rasd(small(), NGramDrafter()),
    "recent": lambda target: Recent(small().calibrated(0.7), 6),
}
"""One of each kind, by its name; behind a comma, what is particular."""
OWN_TEST = {"mtp"}
"""Kinds that read files though no path is given: the target's. They have tests of their own."""
MAKERS |= {
    name: lambda target, kind=kind: kind.make("", target, DrafterOptions())
    for name, kind in KINDS.items()
    if name not in {*MAKERS, *OWN_TEST} and not kind.needs_path
}
VARIANTS: dict[str, Make] = {
    "lm, trimmed": lambda target: TrimmedDrafter(CausalLM(copy.deepcopy(tiny_drafter("llama"))), SOME, VOCAB),
    "eagle, fewer tokens": lambda target: EagleDrafter(tiny_head(target.model), target, tokens=KNOWN),
    "exit, below a table": lambda target: Grafted(MAKERS["exit"](target), NGramDrafter(), 1),
    "medusa, the target's output layer": lambda target: medusa(target, False),
    "parallelspec, fewer tokens": lambda target: parallel_spec(target, SOME),
    "dspark, fewer tokens": lambda target: dspark_of(target, KNOWN, layers=(0, 1)),
    "dspark, where it is confident": lambda target: dspark_of(target, None, 0.5, (0, 1)),
    "dspark, knowing the path": lambda target: dspark_of(target, layers=(0, 1), markov_head_type="rnn"),
    "store, the longest match": lambda target: store(longest=True),
    "graft, 1 forward": lambda target: Grafted(small().calibrated(0.5), TokenRecycling(VOCAB), 1),
    "graft, of what copies": lambda target: Grafted(Copying(head(target)), NGramDrafter(), 2),
    "copy, of a draft model": lambda target: Copying(small().calibrated(0.7)),
    "rasd, of a head": lambda target: Rasd(head(target), TokenRecycling(VOCAB), 3),
}
"""The same kinds with options, and joined in other ways."""
ONE_PASS = {"medusa", "parallelspec", "dspark", "dflash"}
TABLES = {"ngram", "store", "recycling"}


def kind_of(name: str) -> str:
    return name.partition(",")[0]
