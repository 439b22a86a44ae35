"""Writes docs/methods.md from the registries: `python docs/methods.py`."""

import argparse
from collections.abc import Callable, Iterable
from pathlib import Path

from opt_tree.controllers import CONTROLLERS
from opt_tree.core.children import TopK
from opt_tree.core.registry import Method
from opt_tree.decoding.presets import PRESETS
from opt_tree.drafters import KINDS
from opt_tree.policies import POLICIES, make_policy
from opt_tree.policies.registry import parameters, takes
from opt_tree.verifiers import VERIFIERS

PAGE = Path(__file__).with_name("methods.md")
HEAD = """# Methods

All methods that a command can be told by name. A name leads to the file that registers the method. This page is written
by `python docs/methods.py` from what stands beside each method there; [extending.md](extending.md) says how to add one.
"""
CHILDREN = {
    "TopK": "the most probable",
    "LayerBest": "the most probable",
    "IID": "independent draws",
    "WithoutReplacement": "distinct draws",
    "BestAndDraw": "the best and one draw",
}


def spec(method: Method) -> str:
    """The name as a command takes it, with a link to the method's file."""
    reads = method.part is not None or getattr(method, "others", None) is not None
    name = f"`{method.name}:PATH`" if reads else f"`{method.name}`"
    return f"[{name}](../{method.make.__module__.replace('.', '/')}.py)"


def paper(method: Method) -> str:
    return f"[{method.paper}](https://arxiv.org/abs/{method.paper})" if method.paper else ""


def children_of(method: Method) -> str:
    """How a policy picks siblings."""
    if method.name == "plain":
        return "none"
    kind = type(make_policy(method.name, 60, TopK).children).__name__
    return "any kind" if takes(method.name, "siblings") else CHILDREN[kind]


def judged(method: Method) -> str:
    """What a verifier may judge."""
    found = ", ".join(CHILDREN[kind.__name__] for kind in method.make.valid_for)
    return found + (", in chains" if method.make.chains_only else "")


Column = Callable[[Method], str]
COMMON: dict[str, Column] = {"name": spec, "what it is": lambda method: method.about, "paper": paper}


def table(methods: Iterable[Method], more: dict[str, Column]) -> str:
    """A table of methods, with columns besides those that all families have."""
    columns = COMMON | more
    lines = ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    lines += ["| " + " | ".join(column(method) for column in columns.values()) + " |" for method in methods]
    return "\n".join(lines) + "\n"


def page() -> str:
    """The whole page."""
    policy: dict[str, Column] = {
        "parameters": lambda method: ", ".join(parameters(method.name)) or "none",
        "children": children_of,
    }
    return "\n".join(
        [
            HEAD,
            "## Drafters\n",
            "`--drafter SPEC`. PATH is a folder, a Hub id, `demo` (the embedded one) or a known model; of a drafter",
            "that is made of others it is their specs.\n",
            table(KINDS.values(), {}),
            "## Policies\n",
            "`--policies NAME:NUMBER:...`, the numbers in the order of the parameters. *Any kind*: the shape is fixed,",
            "and its children are picked as the verifier needs them.\n",
            table(POLICIES.values(), policy),
            "## Verifiers\n",
            "`--verifiers NAME`. At temperature 0 the judge is `greedy`.\n",
            table(VERIFIERS.values(), {"children": judged}),
            "## Controllers\n",
            "`--controller NAME`: which tree, before each step. The largest tree is that of the tree options.\n",
            table(CONTROLLERS.values(), {}),
            "## Presets\n",
            "`PRESETS[NAME].make(target, drafter)` of `opt_tree.decoding.presets`: a method's decoder.\n",
            table(PRESETS.values(), {}),
        ]
    )


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    PAGE.write_text(page())
