"""Draws the trees of docs/policies.md, drafters.md, verifiers.md and controllers.md: `python docs/trees.py`.

Each picture is a grid of small trees, root above; a node's disc grows with a probability. Policies and verifiers are
asked about laws of four tokens; drafters and controllers decode with the embedded models.
"""

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import opt_tree
from opt_tree.children import TopK
from opt_tree.decode import grow
from opt_tree.errors import counted
from opt_tree.methods.controllers.registry import ControllerRequest, make_controller
from opt_tree.methods.policies.costs import Costs
from opt_tree.methods.policies.registry import POLICIES, make_policy
from opt_tree.methods.policies.sampled import Sampled
from opt_tree.methods.verifiers.registry import VERIFIERS
from opt_tree.target import run_alone
from opt_tree.tools.display.trees import children_of, lines_of
from opt_tree.tools.enumeration import TableDrafter, hashed_laws, log_rows, outcomes, paths_of
from opt_tree.tree import Tree

BLUE, GREY = "#4c7fd0", "#8a8f98"
WIDE, HIGH, HEAD = 170, 118, 34
"""Pixels of a tree with its title, and of the title."""
DRAFTERS = {
    "lm:demo": "a model",
    "eagle:demo": "an EAGLE head",
    "eagle3:demo": "an EAGLE-3 head",
    "exit:demo": "an early exit",
    "parallelspec:demo": "one pass",
    "dspark:demo": "one pass",
    "graft:1:eagle:demo+store:demo": "a head, a table below",
    "store:demo": "a table",
}
CONTROLLERS = ("auto", "calibrated", "predicted:demo")
QUESTION = "Give me three reasons to learn to swim."


@dataclass
class Drawn:
    """A tree of a picture; `probs` decide the size of each row's disc."""

    title: str
    about: str
    tree: Tree
    probs: Sequence[float]


def expected(title: str, tree: Tree) -> Drawn:
    about = f"{counted(tree.nodes, 'node')}, E(A) {tree.expected_accepted:.2f}"
    return Drawn(title, about, tree, np.exp(tree.path_log_probs).tolist())


def policies() -> list[Drawn]:
    """The tree of every policy, of twelve nodes, over one drafter; drawn children by one seed."""
    laws, found = hashed_laws(5, 4), []
    for name in POLICIES:
        if name != "plain":
            policy = make_policy(f"{name}:0" if name in ("opt", "published") else name, 12, TopK)
            drafter = TableDrafter(laws)
            limit = min(6, policy.max_depth)
            found.append(
                expected(name, run_alone(grow(drafter, policy, [0], limit, opt_tree.Sampling(), opt_tree.Random(3))))
            )
    return found


def verifiers() -> list[Drawn]:
    """How likely each node of a drawn tree is kept, over all draws, by every verifier that is exact for such trees."""
    found = []
    for policy, said in ((Sampled.chains(2, 2), "chains"), (Sampled.kary(2, 2, replacement=False), "distinct")):
        for name, method in VERIFIERS.items():
            rule, kind = method.make, type(policy.children)
            exact = not rule.valid_for or kind in rule.valid_for
            if exact and not (rule.refuses(policy.children) or rule.lossy or rule.greedy_only):
                tree, kept = mean_kept(policy, rule)
                found.append(Drawn(name, f"{said}, {sum(kept):.2f} tokens a step", tree, kept))
    return found


def mean_kept(policy: Sampled, verifier: opt_tree.Verifier) -> tuple[Tree, list[float]]:
    """One of the trees that a policy draws, all of one shape, and how likely each of its rows is kept."""
    drafted, wanted = TableDrafter(hashed_laws(11, 3)), hashed_laws(8, 3)
    kept: list[float] = []
    for draw, tree in outcomes(lambda random: run_alone(grow(drafted, policy, [0], 2, opt_tree.Sampling(1.0), random))):
        logits = log_rows(wanted, paths_of(tree, (0,)))
        kept = kept or [0.0] * len(tree)
        for random, path in outcomes(lambda random, tree=tree, rows=logits: tuple(verifier(tree, rows, random).path)):
            for row in path:
                kept[row] += draw.probability * random.probability
    return tree, kept


def drafters() -> list[Drawn]:
    """OPT-Tree of twelve nodes over several drafters, behind the first words of one answer of the embedded target."""
    found = []
    for spec, about in DRAFTERS.items():
        pair = opt_tree.load_pair("demo", spec, dtype="float32")
        ids, plain = pair.encode(QUESTION), opt_tree.Decoder(pair.target, None, opt_tree.Static.empty())
        context = [*ids, *plain.generate(ids, 6).tokens]
        step = next(iter(opt_tree.Decoder(pair.target, pair.drafter, opt_tree.OptTree(12, 0.05)).steps(context, 32)))
        said = f"{about}, {counted(step.draft_forwards, 'forward')}"
        found.append(Drawn(spec.replace(":demo", ""), said, step.tree, np.exp(step.tree.path_log_probs).tolist()))
    return found


def controllers() -> list[Drawn]:
    """The trees that controllers choose, step after step."""
    found = []
    costs = Costs.straight(plain=5e-3, step=5.2e-3, row=2e-4, layer=9e-4, draft_row=2e-5)
    for spec in CONTROLLERS:
        pair = opt_tree.load_pair("demo", "eagle:demo", dtype="float32")
        tree = opt_tree.OptTree(12, 0.05)
        chosen = make_controller(spec, ControllerRequest(pair.target, tree, lambda: costs))
        steps = opt_tree.Decoder(pair.target, pair.drafter, chosen).generate(pair.encode(QUESTION), 96).steps
        for number, step in enumerate(steps[3:8], start=4):
            found.append(expected(f"{spec.partition(':')[0]}, step {number}", step.tree))
    return found


def svg(trees: Sequence[Drawn], columns: int) -> str:
    """The picture: transparent, its colours readable on white and on black."""
    rows = math.ceil(len(trees) / columns)
    parts = [
        f'<g transform="translate({WIDE * (place % columns)} {(HIGH + HEAD) * (place // columns)})">{_tree(one)}</g>'
        for place, one in enumerate(trees)
    ]
    size = f'viewBox="0 0 {WIDE * columns} {(HIGH + HEAD) * rows}"'
    style = f'font-family="sans-serif" font-size="11" fill="{GREY}" text-anchor="middle"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>\n' + "\n".join(parts) + "\n</svg>\n"


def _tree(one: Drawn) -> str:
    lines = lines_of(children_of(one.tree.parents, one.tree.path_log_probs))
    depths = one.tree.depths.tolist()
    wide, deep = max(max(lines), 1), max(*depths, 3)
    places = [
        (
            WIDE / 2 + (line - max(lines) / 2) * min(16, (WIDE - 24) / wide),
            HEAD + 6 + depth * min(24, (HIGH - 14) / deep),
        )
        for line, depth in zip(lines, depths, strict=True)
    ]
    edges = [
        f"M{places[parent][0]:.0f} {places[parent][1]:.0f}L{x:.0f} {y:.0f}"
        for (x, y), parent in list(zip(places, one.tree.parents.tolist(), strict=True))[1:]
    ]
    discs = [
        f'<circle cx="{x:.0f}" cy="{y:.0f}" r="{1.5 + 4.5 * prob**0.5:.1f}"/>'
        for (x, y), prob in list(zip(places, one.probs, strict=True))[1:]
    ]
    root = f'<circle cx="{places[0][0]:.0f}" cy="{places[0][1]:.0f}" r="4"/>'
    return (
        f'<text x="{WIDE / 2:.0f}" y="12" font-weight="bold" font-size="12">{one.title}</text>'
        f'<text x="{WIDE / 2:.0f}" y="25">{one.about}</text>'
        f'<path d="{"".join(edges)}" stroke="{GREY}" fill="none"/>{root}<g fill="{BLUE}">{"".join(discs)}</g>'
    )


PICTURES: dict[str, tuple[Callable[[], list[Drawn]], int]] = {
    "policies": (policies, 5),
    "verifiers": (verifiers, 4),
    "drafters": (drafters, 4),
    "controllers": (controllers, 5),
}


def picture(name: str) -> str:
    make, columns = PICTURES[name]
    return svg(make(), columns)


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    for name in PICTURES:
        Path(__file__).with_name(f"{name}.svg").write_text(picture(name))
