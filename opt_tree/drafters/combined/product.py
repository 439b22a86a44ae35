"""The product of two laws: what a model says of the next token, times what a table says of it.

Owns the product and its normalisation over the whole vocabulary. Two experts that err independently agree on what is
right; a one-pass drafter knows the context and not the path, a table knows the path and not the context.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from opt_tree.core.children import Few, Reduced
from opt_tree.core.continuations import Continuations, Tail
from opt_tree.core.pool import Frontier
from opt_tree.core.probabilities import log_probs_of
from opt_tree.core.step import Outcome
from opt_tree.core.tree import send
from opt_tree.drafters.base import Drafter, DrafterAround
from opt_tree.drafters.combined.grafted import join
from opt_tree.drafters.heads.one_pass import OnePass
from opt_tree.drafters.registry import DrafterOptions, register, two_specs
from opt_tree.drafters.tables.lookup import Lookup, load_with_table
from opt_tree.models.chain_lm import AnyLM
from opt_tree.models.checkpoints import refused

EXPONENTS = (1.0, 0.5)
"""Of the model's law and of the table's, at every depth."""
_WIDTH = 32
"""The model's best tokens that are named beside the table's."""
_LEAST = 1e-2
"""The mass that a table leaves to what it does not name is at least this; so is what a model leaves to tokens that it
has no columns for."""


class Product(DrafterAround):
    """p(w) ~ model(w)^a x (table(w) + rest)^b, with `exponents` (a, b); or (a, b, a', b'), a' and b' below the root.

    `rest` is the mass that the table leaves open, spread evenly over the vocabulary. Normalised over all tokens; named
    are the table's and the model's best. Where the table knows nothing this is the model's law alone, sharpened by a;
    where the model knows nothing, it is the table's as it stands. A one-pass drafter judges well at the root and poorly
    below, where it does not know the path: it wants four exponents. Example, a = b = 1, a vocabulary of 4, of which
    the table is 90 % certain of the second:

        model .4 .3 .2 .1    table .025 .925 .025 .025    product .01 .2775 .005 .0025, divided by their sum
    """

    def __init__(self, drafter: Drafter, table: Lookup, exponents: Sequence[float] = EXPONENTS) -> None:
        if len(exponents) not in (2, 4) or not min(exponents[::2]) > 0 or not min(exponents[1::2]) >= 0:
            raise ValueError(
                "a product has two exponents, or two for the root and two below it, the model's above 0, got "
                f"{tuple(exponents)}"
            )
        if drafter.sparse:
            raise TypeError(f"{drafter.describe()} names a few tokens only: a product takes a whole law and a table")
        super().__init__(drafter)
        join(self, drafter, table)
        self.table, self.exponents = table, tuple(map(float, exponents))
        self._known: tuple[Tensor, list[int]] | None = None

    def root(self, context: list[int]) -> Few:
        known = self.table.root(context)
        return self._product(self.drafter.root(context), known, self.exponents[:2])

    def expand(self, frontier: Frontier) -> Few:
        known = self.table.expand(frontier)
        return self._product(self.drafter.expand(frontier), known, self.exponents[-2:])

    def continuations(self, context: list[int]) -> Continuations | None:
        """Of a one-pass drafter on the host: what follows a node then depends on its last tokens and its depth."""
        if isinstance(self.drafter, OnePass) and self.drafter.target.device.type == "cpu":
            return Continuations(self._in_one_pass(self.drafter, context), self.table.order)
        return None

    def _in_one_pass(self, drafter: OnePass, context: list[int]) -> Callable[[Tail, int], Mapping[int, float]]:
        """Run a one-pass drafter, and return what follows a tail at a depth: `product`, of one node."""
        drafter.root(context)
        laws = log_probs_of(drafter.scores)
        depths, columns = laws.shape
        exponents = [self.exponents[:2], *[self.exponents[-2:]] * (depths - 1)]
        powered = (laws * torch.tensor([[a] for a, _ in exponents], dtype=laws.dtype)).exp_()
        totals, (best, places) = powered.sum(1, dtype=torch.float64).tolist(), powered.topk(min(_WIDTH, columns))
        models = list(zip(powered.numpy(), totals, best.tolist(), exponents, strict=True))
        if (tokens := drafter.tokens) is None:
            vocab, names = columns, places.tolist()
            place: Sequence[int] = range(columns)
        else:
            vocab, names = drafter.target.vocab, tokens[places].tolist()
            place = self._places(tokens, vocab)
        # What each token without a column has of the model, before it is raised to a.
        missing = _LEAST / (1 - _LEAST) / max(vocab - columns, 1)
        unknown = laws.isneginf().all(1).tolist()

        def law(tail: Tail, depth: int) -> Mapping[int, float]:
            known = self.table.law(tail)
            if depth >= depths or unknown[depth]:
                return known
            model, total, best, (a, b) = models[depth]
            rest = max(1 - sum(known.values()), _LEAST) / vocab
            probs, alone, least = {}, rest**b, missing**a
            total += least * (vocab - columns)
            for token, prob in known.items():
                own = least if (column := place[token]) < 0 else model.item(column)
                total -= own
                probs[token] = own * (prob + rest) ** b
            mass = sum(probs.values()) + max(total, 0.0) * alone
            for token, own in zip(names[depth], best, strict=True):
                if token not in known:
                    probs[token] = own * alone
            return {token: prob / mass for token, prob in probs.items()}

        return law

    def _places(self, tokens: Int[Tensor, " columns"], vocab: int) -> list[int]:
        """The column of each token, -1 for those without one."""
        if self._known is None or self._known[0] is not tokens:
            places = torch.full((vocab,), -1)
            places[tokens] = torch.arange(len(tokens))
            self._known = tokens, places.tolist()
        return self._known[1]

    def observe(self, outcome: Outcome) -> None:
        self.drafter.observe(outcome)
        self.table.observe(outcome)

    def _product(
        self, scores: Float[Tensor, "rows vocab"] | Few | Reduced, known: Few, exponents: Sequence[float]
    ) -> Few:
        assert not isinstance(scores, Few), f"{self.drafter.describe()} is not sparse, and answers in Few"
        columns = scores.scores if isinstance(scores, Reduced) else scores
        shared = not columns.stride(0)  # one law for all rows, as a one-pass drafter answers: normalised once
        law, tokens = log_probs_of(columns[:1] if shared else columns), None
        if isinstance(scores, Reduced):
            law, tokens = _spread(scores._replace(scores=law)), scores.tokens
        return product(law.expand(len(columns), -1), known, exponents, tokens)

    def at_temperature(self, temperature: float) -> "Product":
        drafter = self.drafter.at_temperature(temperature)
        return self if drafter is self.drafter else Product(drafter, self.table, self.exponents)

    def describe(self) -> str:
        a, b, *below = self.exponents
        more = f" (^{below[0]:g} x ^{below[1]:g} below the root)" if below else ""
        return f"({self.drafter.describe()})^{a:g} x ({self.table.describe()})^{b:g}{more}"

    @property
    def settings(self) -> dict[str, Any]:
        table = {"table": self.table.describe(), **self.table.settings}
        return self.drafter.settings | {"exponents": list(self.exponents), **table}


def _spread(law: Reduced) -> Float[Tensor, "rows vocab"]:
    """Return a law over the whole vocabulary: `_LEAST` of it lies, evenly, on the tokens without a column."""
    if not (missing := law.vocab - len(law.tokens)):
        return law.whole()
    wide = law.scores.new_full((len(law.scores), law.vocab), math.log(_LEAST / missing))
    return wide.index_copy_(1, law.tokens, law.scores + math.log1p(-_LEAST))


def product(
    law: Float[Tensor, "rows vocab"],
    known: Few,
    exponents: Sequence[float],
    columns: Int[Tensor, " columns"] | None = None,
) -> Few:
    """Return the product of a whole law, in log-probabilities, and of what a table knows; see `Product`.

    `columns`: the tokens that the model may name; None: all.
    """
    a, b = exponents
    rows, vocab = law.shape
    unknown = law.isneginf().all(1, keepdim=True)
    shared = law[:1] if not law.stride(0) else law
    tokens, listed_log_probs = send(known.tokens, law.device), send(known.log_probs, law.device)
    listed = (tokens >= 0) & (tokens < vocab)
    probs = listed_log_probs.exp().masked_fill(~listed, 0.0)
    rest = (1 - probs.sum(1, keepdim=True)).clamp_min(_LEAST) / vocab
    # In float64: what the listed tokens have of the sum is taken out of it again.
    powered = (a * shared).double()
    total = powered.logsumexp(1, keepdim=True).exp().expand(rows, 1)
    own = powered if columns is None else powered[:, columns]
    best, places = (part.expand(rows, -1) for part in own.topk(min(_WIDTH, own.shape[1])))
    names = places if columns is None else columns[places]
    model = powered.expand(rows, -1).gather(1, tokens.clamp(0, vocab - 1)).masked_fill(~listed, -torch.inf)
    unlisted = (total - model.exp().sum(1, keepdim=True)).clamp_min(0)
    both = model + b * (probs + rest).log()
    alone = (best + b * rest.log()).masked_fill((names[:, :, None] == tokens[:, None, :]).any(2), -torch.inf)
    mass = both.exp().sum(1, keepdim=True) + unlisted * rest**b
    log_probs = torch.cat([both, alone], 1) - mass.log()
    as_it_stands = torch.nn.functional.pad(listed_log_probs.to(log_probs), (0, alone.shape[1]), value=-torch.inf)
    return Few(torch.where(unknown, as_it_stands, log_probs), torch.cat([tokens, names], 1))


def _exponents(path: str) -> tuple[Sequence[float], str]:
    """The exponents that a spec begins with, else the default ones; and what follows them."""
    given = re.match(r"([\d.]+(?:,[\d.]+)+):", path)
    return ([float(number) for number in given[1].split(",")], path[given.end() :]) if given else (EXPONENTS, path)


@register(
    "product",
    about="a model's law times a table's: product:eagle:demo+store:demo",
    others=lambda path: two_specs("product", _exponents(path)[1]),
)
def _load(path: str, target: AnyLM, options: DrafterOptions) -> Drafter:
    exponents, pair = _exponents(path)
    model, table = load_with_table("product", pair, target, replace(options, bare=True))
    with refused(f"product:{path}"):
        return Product(model, table, exponents)
