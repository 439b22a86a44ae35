"""What may be asked of a first GPU: parts, in how many seconds each is done, and targets."""

from dataclasses import dataclass

from evaluation.command_line import option

SHAPES = ("demo", "smollm2", "1b", "7b")
"""The embedded pair, the public model where it is on this machine, and the embedded pair inflated."""
ESTIMATES = {"exact": 15, "machine": 5, "buckets": 60, "decoding": 200, "budgets": 80, "steps": 40}
ESTIMATES |= {"canonical": 130, "tests": 40}
"""Seconds. Those of `exact`, `machine`, `budgets` and `canonical` were seen on an H200, the others are guessed."""


@dataclass(frozen=True)
class Options:
    """What is tried, and where it is noted."""

    dry_run: bool = option(False, "with small sizes, also on a CPU: shows that all runs, its times mean nothing")
    parts: str = option("", "comma list of parts; by default all")
    shapes: str = option("", f"comma list of targets; by default {','.join(SHAPES)}, those that are here")
    output: str = option("gpu_first_light", "writes this name with .json and .md")
    minutes: float = option(10.0, "no part is begun after this long")

    def __post_init__(self) -> None:
        for part in self.chosen:
            if part not in ESTIMATES:
                raise ValueError(f"--parts: no part {part!r}; there are {', '.join(ESTIMATES)}")
        for shape in filter(None, self.shapes.split(",")):
            if shape not in SHAPES:
                raise ValueError(f"--shapes: no shape {shape!r}; there are {', '.join(SHAPES)}")

    @property
    def chosen(self) -> tuple[str, ...]:
        return tuple(self.parts.split(",")) if self.parts else tuple(ESTIMATES)
