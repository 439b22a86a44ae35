"""Writes docs/methods.md and a page a family of methods from the registries: `python docs/methods.py`."""

import argparse
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from opt_tree.children import TopK
from opt_tree.methods.controllers.registry import CONTROLLERS
from opt_tree.methods.drafters.registry import KINDS
from opt_tree.methods.policies.registry import POLICIES, make_policy, parameters, takes
from opt_tree.methods.registry import Method
from opt_tree.methods.verifiers.registry import VERIFIERS
from opt_tree.methods.verifiers.rules import all_but_chains
from opt_tree.tools.presets import PRESETS

DOCS = Path(__file__).parent
READ_OF_IT = """*Read of it* says what of the paper's text or code was at hand. Where that is less than the whole text
or the code, more may differ than stands there. This page is written by `python docs/methods.py` from what stands beside
each method in the file that its name leads to; [extending.md](extending.md#{anchor}) says how to add one.
"""
HEAD = """# Methods

All methods that a command can be told by name, a page a family. [Which one?](which.md) leads to one of them by model,
machine and text. `python docs/methods.py` writes these pages from the registries.
"""


@dataclass(frozen=True)
class Family:
    """A page of methods of one kind."""

    title: str
    methods: Mapping[str, Method]
    about: str
    picture: str
    """What the picture shows; docs/trees.py draws it."""
    anchor: str
    """The section of extending.md."""


FAMILIES = {
    "drafters": Family(
        "Drafters",
        KINDS,
        "A drafter says which tokens may follow, and how likely each is. `--drafter SPEC` names one. PATH is a "
        "folder, a Hub id, `demo` (the embedded one) or a known model; of a drafter that is made of others it is "
        "their specs.",
        "OPT-Tree of 12 nodes, threshold 0.05, behind the first words of one answer of the embedded target. A "
        "disc grows with the probability of its path. A model or a head needs a forward a layer, one-pass heads "
        "one for all, tables none",
        "a-drafter",
    ),
    "policies": Family(
        "Tree policies",
        POLICIES,
        "A policy says below which nodes to draft next, when to stop, and which nodes the target scores. "
        "`--policies NAME:NUMBER:...`, the numbers in the order of the parameters. *Any kind*: the shape is "
        "fixed, and its children are picked as the verifier needs them.",
        "One drafter of four tokens, 12 nodes, at most six layers, every policy with its defaults (`opt` and "
        "`published` at threshold 0); a disc grows with the probability of its path, and E(A) is their sum. Drawn "
        "trees are one draw",
        "a-tree-policy",
    ),
    "verifiers": Family(
        "Verifiers",
        VERIFIERS,
        "A verifier says which path of a scored tree survives, and draws the target's own token. `--verifiers "
        "NAME`. At temperature 0 the judge is `greedy`. [Results](../results/verifiers.md) say which emits the "
        "most.",
        "How likely each node is kept, over all trees that are drawn and all that the verifier draws, counted out "
        "on laws of three tokens: two independent chains, and two distinct children a node. The laws are made up: "
        "where they are others, the order is another",
        "a-verifier",
    ),
    "controllers": Family(
        "Controllers",
        CONTROLLERS,
        "A controller says which policy the next step uses. `--controller NAME`; the largest tree is that of the "
        "tree options.",
        "Five steps in a row of one answer of the embedded target by its EAGLE head, at most 12 nodes; for `auto` "
        "a row of the target costs a twenty-fifth of a step",
        "a-controller",
    ),
}
CHILDREN = {
    "TopK": "the most probable",
    "LayerBest": "the most probable",
    "IID": "independent draws",
    "WithoutReplacement": "distinct draws",
    "BestAndDraw": "the best and one draw",
}


def called(method: Method) -> str:
    """The name as a command takes it."""
    reads = method.part is not None or getattr(method, "others", None) is not None
    return f"{method.name}:PATH" if reads else method.name


def spec(method: Method) -> str:
    """The name as a command takes it, with a link to the method's file."""
    return f"[`{called(method)}`](../{method.make.__module__.replace('.', '/')}.py)"


OWN = "this library's own"
WITHOUT = {
    "binary": "none: a baseline of 2406.17276",
    "kary": "none: a baseline of 2406.17276",
    "ngram": "none: [prompt lookup](https://github.com/apoorvumang/prompt-lookup-decoding)",
    "plain": "none: no drafting",
}
"""Where methods come from that have no paper and are not this library's own."""


def paper(method: Method) -> str:
    if not method.paper:
        return WITHOUT.get(method.name, OWN)
    return f"[{method.paper}](https://arxiv.org/abs/{method.paper})"


def children_of(method: Method) -> str:
    """How a policy picks siblings."""
    if method.name == "plain":
        return "none"
    kind = type(make_policy(method.name, 60, TopK).children).__name__
    return "any kind" if takes(method.name, "siblings") else CHILDREN[kind]


def judged(method: Method) -> str:
    """What a verifier may judge."""
    found = ", ".join(CHILDREN[kind.__name__] for kind in method.make.valid_for) or "any kind"
    return found + (", in chains" if method.make.refuses is all_but_chains else "")


READ = {
    "2211.17192": "as the delayed trees' paper (2602.16994) has it",
    "2305.09781": "as the delayed trees' paper (2602.16994) has it",
    "2310.15141": "as the delayed trees' paper (2602.16994) has it",
    "2309.17453": "abstract, the code of its cache",
    "2311.08252": "whole text, code",
    "2401.10774": "whole text, code",
    "2401.15077": "code",
    "2402.12374": "whole text",
    "2403.10444": "abstract, opening, two implementations that name its algorithm",
    "2406.03853": "its first page, others' reports",
    "2406.16858": "whole text, code",
    "2406.17276": "whole text, code",
    "2408.08696": "abstract, code, a plot of results",
    "2409.00142": "whole text",
    "2410.05589": "abstract, opening, others' reports",
    "2410.11744": "whole text",
    "2410.18234": "abstract, tables, the code of 2602.16994's authors",
    "2412.18910": "whole text",
    "2412.19437": "others' quotations of its section 2.2, the code of transformers",
    "2502.14856": "abstract, a description of the code",
    "2503.01840": "whole text, code",
    "2503.03434": "abstract, others' reports",
    "2505.12398": "text without its formulas and proofs",
    "2601.07353": "whole text",
    "2602.06036": "whole text, code",
    "2602.16961": "abstract, reviews, the authors' code",
    "2602.16994": "whole text",
    "2606.18394": "whole text, code",
    "2607.05147": "whole text, code",
    "2609.21827": "abstract, two summaries of the whole text",
}
"""What was read of each paper that a method names."""
DIFFERS = {
    "adaeagle": "as `predicted`",
    "adaeagle_ddd": "as `predicted`",
    "beta": "the posterior's update is ours",
    "calibrated": "the update and the prediction are ours",
    "delayed_selected": "trained on one draw a root, where the paper averages four; the penalty's sizes are ours",
    "dspark": "no scheduler, one temperature for all places; layer -1, its code's embedding, is refused",
    "dynamic_depth": "the default threshold, 0.2, is ours: it is the pair's, and the paper's, 0.74, is another pair's; "
    "the policy drafts ten layers at most, the paper and the preset eleven",
    "dyspec": "slots are filled layer by layer, a forward a layer, where the paper's heap asks for one a node",
    "dflash": "every layout in [heads.md](heads.md); no chain, a tree over its laws",
    "eagle1": "grown from rates; the released tree is `eagle1_list`",
    "eesd": "as `calibrated` and `exit`",
    "eesd_beta": "as `beta` and `exit`",
    "exit": "reads through the target's output layer, where by reports the paper's exit trains one of its own",
    "jetspec": "the paper's budget counts the root, and its layers are as many as a block drafts; here ten unless told",
    "khisti": "all tokens are drawn from, where the paper keeps the 40 likeliest; the programme settles 5 of either",
    "lm": "with another tokenizer TLI by bytes (2502.05202: abstract, others' reports, the code of transformers)",
    "medusa": "a rate is a child's whose parent was accepted, the paper's a head's at every place",
    "medusa:PATH": "the paper's heads have output layers of their own, and load; those trained here read through the "
    "target's; Medusa-2, which trains the target too, is not here",
    "parallelspec": "what stands for a mask's feature is ours: by P-EAGLE's authors (2602.01469) the paper omits it",
    "parallelspec_eagle": "as `parallelspec`",
    "parallelspec_medusa": "as `parallelspec`: its head reads EAGLE's pairs, the paper's for Medusa was not read",
    "predicted": "the width, the penalty and a LayerNorm on what goes in are ours: the paper does not say them",
    "mtp": "one layer drafts all depths, of several the first; the paper has a layer for each depth",
    "rasd": "the pruning is a report's, the sizes are EAGLE-2's and REST's; as a drafter under another policy, that "
    "policy picks from both trees",
    "recent": "a prompt is cut once, and what follows is all read; the paper cuts again as the text grows",
    "rheo": "grown and stopped as `opt`, where the paper grows EAGLE-3's trees; draws from all tokens, where it keeps "
    "128; one token stands before the draw, its best setting",
    "ngram": "code; counts all matches, where the code copies what followed the longest one",
    "sequoia": "its nodes and layers are given, where the paper searches for them by measuring the hardware",
    "store": "interpolated counts, where REST takes the longest match",
    "talon": "the paper's budget counts the root and limits no layers: the policy has ten unless told, its preset 60",
    "threshold_chain": "on one path, as 2412.18910 compares it",
    "trimmed": "of a draft model, where the paper trims EAGLE-2's head; that is `eagle` with a list beside it",
    "typical": "the token behind the path is drawn, where the paper takes the target's best one",
    "without_replacement": "where no token of the drafter is left, none is tried; the paper draws among the others",
}
"""What is known to differ from the paper, by the method's name, or as a command is told it, where one alone differs."""


def read(method: Method) -> str:
    """What was read of a method's paper, and what differs. KeyError for a paper that `READ` has not."""
    texts = (method.paper and READ[method.paper], DIFFERS.get(called(method)) or DIFFERS.get(method.name))
    return "; ".join(filter(None, texts)) or "nothing to read"


Column = Callable[[Method], str]
COMMON: dict[str, Column] = {
    "name": spec,
    "what it is": lambda method: method.about,
    "paper": paper,
    "read of it; what differs": read,
}


def table(methods: Iterable[Method], more: dict[str, Column]) -> str:
    """A table of methods, with columns besides those that all families have."""
    columns = COMMON | more
    lines = ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    lines += ["| " + " | ".join(column(method) for column in columns.values()) + " |" for method in methods]
    return "\n".join(lines) + "\n"


POLICY: dict[str, Column] = {
    "parameters": lambda method: ", ".join(parameters(method.name)) or "none",
    "children": children_of,
}
MORE: dict[str, dict[str, Column]] = {"policies": POLICY, "verifiers": {"children": judged}}
"""The columns that one family has and the others have not."""


def family_page(name: str) -> str:
    family = FAMILIES[name]
    return "\n".join(
        [
            f"# {family.title}\n\n{family.about}\n",
            f"![{family.picture}]({name}.svg)\n",
            f"*{family.picture}.*\n",
            table(family.methods.values(), MORE.get(name, {})),
            READ_OF_IT.format(anchor=family.anchor),
        ]
    )


def overview() -> str:
    """The page that leads to the others, and has the presets, which are made of all families."""
    parts = [HEAD]
    for name, family in FAMILIES.items():
        names = ", ".join(f"`{method.name}`" for method in family.methods.values())
        parts += [f"## {name.title()}\n", f"[{family.title}]({name}.md): {names}.\n"]
    return "\n".join(
        [
            *parts,
            "## Presets\n",
            "`make_preset(NAME, target, drafter)` of `opt_tree.tools.presets`: a method's decoder. PATH is the folder",
            "of what was trained for it. `python -m experiments.systems` sets those of five papers beside OPT-Tree.",
            "A tree policy is one as well, with 60 nodes at most and judged by `match`: `eagle2`, `sequoia:8`.",
            "`sequoia`, `medusa` and `eagle1` are trees of assumed rates, each rank's half of the last one's.\n",
            table(PRESETS.values(), {}),
        ]
    )


def pages() -> dict[str, str]:
    """The text of every page by its file's name."""
    return {"methods.md": overview()} | {f"{name}.md": family_page(name) for name in FAMILIES}


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    for name, text in pages().items():
        (DOCS / name).write_text(text)
