"""What other policies would have drawn at every step of a generation, from the same drafter.

The text is there when they draw: they stand where each step of the run began (`shared_drafter.py`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

from torch import Tensor

from opt_tree.decode import grow, layers_left
from opt_tree.decoder import Decoder
from opt_tree.drafter import Drafter
from opt_tree.errors import require
from opt_tree.generation import Generation
from opt_tree.policy import TreePolicy, check_grows
from opt_tree.sampling import Temperature
from opt_tree.target import Asking
from opt_tree.tools.along import check_along
from opt_tree.tools.shared_drafter import drafting_for
from opt_tree.tools.stored_text import StoredText, follow
from opt_tree.tree import Tree
from opt_tree.verify import match


@dataclass(frozen=True)
class Beside:
    """A generation, and at each of its steps the trees of other policies."""

    generation: Generation
    trees: list[dict[str, Tree]]
    """Of every step: the tree of each policy, at the same context; the root alone where there was no room to draft."""
    accepted: list[dict[str, int]]
    """Of every step: the A that each tree would have had. Missing where that is not known: behind the end of the text,
    and where the run's verifier draws text that depends on the tree (every one but `greedy` and `match`)."""


def generate_beside(
    decoder: Decoder,
    policies: Mapping[str, TreePolicy],
    prompt: Sequence[int] | Tensor,
    max_new_tokens: int = 128,
    **options: Any,
) -> Beside:
    """Do what `decoder.generate(prompt, max_new_tokens, **options)` does, then draw the trees of `policies` beside it.

    That costs their draft forwards and, for a drafter that reads the target, one forward of the target a step. Raises
    ValueError for a decoder without a drafter, for a drafter that learns from every tree (Token Recycling) and for a
    policy that draws its children: it has no one tree. Raises TypeError for what grows no tree itself.
    """
    require(Decoder, decoder=decoder)
    require(Mapping, policies=policies)
    target, drafter = decoder.target, decoder.drafter
    if drafter is None:
        raise ValueError("a decoder without a drafter has no trees to compare others with")
    if drafter.reads_logits:
        raise ValueError(f"{drafter.describe()} learns from every tree that it draws: others would have taught it more")
    for name, policy in policies.items():
        check_grows(policy)
        check_along(name, policy)
    made = decoder.generate(prompt, max_new_tokens, **options)
    sampling = options.get("sampling", Temperature())
    places = [0, *accumulate(made.accept_lengths)][: len(made.steps)]
    text, begin = StoredText(made.prompt, made.tokens, max_new_tokens), len(made.prompt)
    whole, end = [*text.prompt, *text.tokens], min(target.max_context, begin + max_new_tokens)

    def drawing(policy: TreePolicy, asker: Drafter) -> Asking[list[Tree]]:
        drawn = []
        for place in places:
            limit = min(policy.max_depth, layers_left(asker, begin + place, end))
            drawn.append((yield from grow(asker, policy, whole[: begin + place], limit)))
        return drawn

    walks = {name: partial(drawing, policy) for name, policy in policies.items()}
    found = decoder.led(lambda: decoder.compute(drafting_for(drafter, text, walks, target, sampling)))
    trees = [{name: drawn[step] for name, drawn in found.items()} for step in range(len(places))]
    told = sampling.greedy or decoder.verifier is match
    return Beside(made, trees, _accepted(made, trees) if told else [{} for _ in made.steps])


def _accepted(generation: Generation, trees: list[dict[str, Tree]]) -> list[dict[str, int]]:
    """Follow the text down every tree: with `greedy` and `match` it is the same whatever the tree."""
    found, begin = [], 0
    for length, beside in zip(generation.accept_lengths, trees, strict=True):
        rest = generation.tokens[begin:]
        paths = {name: follow(tree, rest) for name, tree in beside.items()}
        # Where the text ends inside a tree, nobody knows what would have come next.
        open_end = {name for name, path in paths.items() if len(path) > len(rest) and path[-1] in beside[name].parents}
        found.append({name: len(path) - 1 for name, path in paths.items() if name not in open_end})
        begin += length
    return found
