"""What a demo can be told: its options, and their defaults for the models that are known by name."""

import dataclasses
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import opt_tree
from evaluation.command_line import option, parse, run_command, work_of
from evaluation.run.options import AUTO, CONTROLLER, Models, read_tree
from opt_tree.models.known import KNOWN
from opt_tree.system.files import check_writable

# The best trees for the embedded models on one CPU core, not the paper's: there a node costs more than on a GPU. Below
# one forward of a model the layers are a table's, which cost no forward: they are worth drafting for less.
ALONE, ABOVE_A_TABLE = (12, 0.45, 10), (6, 0.1, 10)
BESIDE = ("eagle2", "binary", "chain")
"""Policies whose trees a page shows beside the run's, at the same budget."""


@dataclass(frozen=True)
class Options(Models):
    """Everything a demo can be told. The command line is made of these fields."""

    embedded: ClassVar[str] = "graft:1:lm:demo+store:demo"

    assistant: str | None = option(
        None, "causal LM that assists transformers; by default the draft model, or the embedded one"
    )
    prompt: str | None = option(None, "the question (default: a handful of built-in ones)")
    nodes: int | str | None = option(
        None,
        "drafted nodes per tree, root excluded (the paper's n); auto: nodes and layers by what they cost here, the "
        "default on a CPU for a model without a tree of its own",
    )
    threshold: float | None = option(None, "least gain in E(A) worth one more layer (the paper's delta)")
    max_depth: int | None = option(None, "layers drafted at most")
    controller: str | None = option(None, CONTROLLER)
    temperature: float = option(0.0, "0: greedy")
    top_p: float = option(1.0, "nucleus, at temperature > 0")
    top_k: int = option(0, "0: off")
    max_new_tokens: int = option(128, "length of an answer at most", least=1)
    rounds: int = option(3, "repetitions of the comparison", least=1)
    seed: int = option(0, "of the sampling")
    eager: bool = option(False, "leave compiled forwards alone that are in the cache")
    bare: bool = option(False, "take the drafter as it is, not sharpened by its fitted temperature")
    html: str | None = option(None, "write the answer to this file, as a page to step through: its trees, E(A), times")

    def __post_init__(self) -> None:
        super().__post_init__()
        read_tree(self)
        if self.nodes != AUTO:
            self.policy()  # refuses what is no tree
        if self.sampling.greedy and (self.top_p < 1 or self.top_k):
            raise ValueError("top_p and top_k act at temperature > 0 only; give --temperature")
        if self.prompt is not None and not self.prompt.strip():
            raise ValueError("the prompt is empty")
        if self.prompt is not None and any("\ud800" <= character <= "\udfff" for character in self.prompt):
            given, read_as = self.prompt.encode(errors="surrogateescape"), sys.getfilesystemencoding()
            raise ValueError(
                f"the prompt {given!r} is no {read_as}, this terminal's encoding; PYTHONUTF8=1 takes UTF-8"
            )
        if self.eager and self.compile:
            raise ValueError("--compile makes what --eager leaves alone: give one of them")
        if self.html:
            check_writable(Path(self.html))

    def default_drafter(self) -> str:
        """As for every command; ValueError for a model that brings no drafter."""
        if self.base_model_path not in ("demo", *KNOWN):
            raise ValueError(f"no drafter named for {self.base_model_path}: give --drafter")
        return super().default_drafter()

    def asks_costs(self, device: str) -> bool:
        """Whether trees are what they cost here: where it was said, and where nobody chose a tree for this model.

        The published numbers are meant for a GPU; on a CPU they can be slower than no tree at all.
        """
        chosen = self.base_model_path in ("demo", *KNOWN) or (self.nodes, self.threshold) != (None, None)
        return self.nodes == AUTO or (device == "cpu" and not chosen)

    def policy(self) -> "opt_tree.OptTree":
        """The tree: the demo's own for a known model, else the published one; named numbers replace its own."""
        known = KNOWN.get(self.base_model_path)
        default = opt_tree.OptTree(*known.tree(self.weights), 10) if known else opt_tree.OptTree()
        if self.base_model_path == "demo":
            default = opt_tree.OptTree(*(ABOVE_A_TABLE if self.drafter == self.embedded else ALONE))
        named = {name: getattr(self, name) for name in ("nodes", "threshold", "max_depth")}
        return dataclasses.replace(
            default, **{name: value for name, value in named.items() if value not in (None, AUTO)}
        )

    @property
    def sampling(self) -> "opt_tree.Sampling":
        return opt_tree.Sampling(self.temperature, self.top_p, self.top_k)


@dataclass(frozen=True)
class EagleOptions(Options):
    """The same with another default: the embedded EAGLE head drafts the first layer, the store those below."""

    embedded: ClassVar[str] = "graft:1:eagle:demo+store:demo"


def main(arguments: list[str] | None = None, kind: type[Options] = Options) -> int:
    """Run a demo and return its exit status: 2, after one line on stderr, for whatever a caller got wrong."""
    program, about = Path(sys.argv[0]).name, "Decode with OPT-Tree, and compare."
    return run_command(lambda: work_of("evaluation.demo.__main__:run")(parse(kind, program, about, arguments)))
