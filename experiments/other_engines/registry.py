"""The peers: which engine each is, how it is set, and what it needs."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec

from experiments.other_engines.engines import Settings

REFERENCE, BASE = "transformers-float32", "transformers"
"""Whose text is compared with, and whose speed."""
_INSTALL = {
    "xllamacpp": "xllamacpp",
    "llama_cpp": "llama-cpp-python --no-binary llama-cpp-python, which builds llama.cpp for this CPU",
    "openvino_genai": "openvino-genai",
}
Trees = Mapping[str | None, dict[str, float]]
"""What OPT-Tree grows where a drafter does not say it, by what the weights are quantised to."""
GROUPS = ("transformers", "llama.cpp", "openvino", "opt_tree")
"""What --peers takes: a peer belongs to the group that its name begins with."""


@dataclass(frozen=True)
class Peer:
    """One way to run the model."""

    name: str
    engine: str
    settings: Settings
    weights: str = "bfloat16"
    """In what form it has them, for a reader."""

    @property
    def missing(self) -> str | None:
        """Why it cannot run here, in a few words; None where it can."""
        if find_spec(self.engine) is None:
            return f"not installed: pip install {_INSTALL.get(self.engine, self.engine)}"
        if self.engine in _INSTALL and not self.settings.gguf:
            return "needs the model as a GGUF file: --gguf"
        return None


def peers_of(settings: Settings, bf16: str, drafters: Sequence[str], groups: Sequence[str], trees: Trees) -> list[Peer]:
    """Every peer of the groups, with the reference first whatever is asked for.

    `settings` has the model's files and what all have in common; `bf16` is its GGUF file in bfloat16, or empty.
    `drafters`: "SPEC" or "SPEC@NODES/THRESHOLD". `trees`: those of each kind of weights that
    opt_tree has, None for the dtype.
    """
    reference = Peer(REFERENCE, "transformers", replace(settings, dtype="float32"), "float32")
    found = [*_foreign(settings, bf16), *_own(settings, drafters, trees)]
    return [reference, *(peer for peer in found if any(peer.name.startswith(group) for group in groups))]


def _foreign(settings: Settings, bf16: str) -> Iterator[Peer]:
    look = replace(settings, lookup=True, assistant="")
    dtype, few = settings.dtype, "the GGUF file's"
    yield Peer(BASE, "transformers", replace(settings, assistant=""), dtype)
    yield Peer("transformers, prompt lookup", "transformers", look, dtype)
    if settings.assistant:
        yield Peer("transformers, assisted", "transformers", settings, dtype)
    yield Peer("llama.cpp", "xllamacpp", settings, few)
    yield Peer("llama.cpp, lookup", "xllamacpp", look, few)
    yield Peer("llama.cpp bf16", "xllamacpp", replace(settings, gguf=bf16))
    yield Peer("llama.cpp bf16, lookup", "xllamacpp", replace(look, gguf=bf16))
    yield Peer("llama.cpp, built here", "llama_cpp", settings, few)
    yield Peer("openvino", "openvino_genai", settings, few)
    yield Peer("openvino, prompt lookup", "openvino_genai", look, few)


def _own(settings: Settings, drafters: Sequence[str], trees: Trees) -> Iterator[Peer]:
    for kind, usual in trees.items():
        said = kind or settings.dtype
        for compiled in (False, True) if kind is None else (True,):
            how = replace(settings, compile=compiled, weights=kind)
            end = f"{f', {kind}' if kind else ''}{', compiled' if compiled else ''}"
            yield Peer(f"opt_tree plain{end}", "opt_tree", how, said)
            for named in drafters:
                spec, tree = parse_drafter(named)
                tree = tree or usual
                name = f"{spec}@{tree['nodes']}/{tree['threshold']}" if tree else spec
                yield Peer(f"opt_tree {name}{end}", "opt_tree", replace(how, drafter=spec, tree=tree), said)


def parse_drafter(named: str) -> tuple[str, dict[str, float]]:
    """Read "SPEC" or "SPEC@NODES/THRESHOLD" as the spec and the tree's parameters."""
    spec, at, tree = named.partition("@")
    if not at:
        return spec, {}
    nodes, _, threshold = tree.partition("/")
    try:
        return spec, {"nodes": int(nodes), "threshold": float(threshold)}
    except ValueError as error:
        raise ValueError(f"a drafter is SPEC or SPEC@NODES/THRESHOLD, got {named!r}") from error
