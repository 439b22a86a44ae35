"""The peers: which engine each is, how it is set, and what it needs."""

import json
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
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
    plain: str = ""
    """The peer that decodes plainly with the same engine and weights."""

    @property
    def loads(self) -> Hashable:
        """What is the same of peers that can share a process: torch's, which decode with one model in turn."""
        if self.engine not in ("transformers", "opt_tree"):
            return self.name
        how = replace(self.settings, lookup=False, assistant="", drafter="", tree={})
        return self.engine, json.dumps(asdict(how))

    @property
    def missing(self) -> str | None:
        """Why it cannot run here, in a few words; None where it can."""
        if find_spec(self.engine) is None:
            return f"not installed: pip install {_INSTALL.get(self.engine, self.engine)}"
        if self.engine in _INSTALL and not self.settings.gguf:
            return "needs the model as a GGUF file: --gguf"
        return None


def peers_of(
    settings: Settings,
    bf16: str,
    drafters: Sequence[str],
    groups: Sequence[str],
    trees: Trees,
    assistant_gguf: str = "",
    eager: bool = False,
) -> list[Peer]:
    """Every peer of the groups, with the reference first whatever is asked for.

    `settings` has the model's files and what all have in common; `bf16` is its GGUF file in bfloat16, or empty.
    `drafters`: "SPEC" or "SPEC@NODES/THRESHOLD". `trees`: those of each kind of weights that
    opt_tree has, None for the dtype. `assistant_gguf`: the GGUF file of the assistant. `eager`: none is compiled.
    """
    reference = Peer(REFERENCE, "transformers", replace(settings, dtype="float32", assistant=""), "float32", REFERENCE)
    found = [*_foreign(settings, bf16, assistant_gguf), *_own(settings, drafters, trees, eager)]
    return [reference, *(peer for peer in found if any(peer.name.startswith(group) for group in groups))]


def _foreign(settings: Settings, bf16: str, assistant_gguf: str) -> Iterator[Peer]:
    plain = replace(settings, assistant="")
    look, drafted = replace(plain, lookup=True), replace(settings, assistant=assistant_gguf)
    dtype, few = settings.dtype, "the GGUF file's"
    yield Peer(BASE, "transformers", plain, dtype, BASE)
    yield Peer("transformers, prompt lookup", "transformers", look, dtype, BASE)
    if settings.assistant:
        yield Peer("transformers, assisted", "transformers", settings, dtype, BASE)
    yield Peer("llama.cpp", "xllamacpp", plain, few, "llama.cpp")
    yield Peer("llama.cpp, lookup", "xllamacpp", look, few, "llama.cpp")
    if assistant_gguf:
        yield Peer("llama.cpp, draft model", "xllamacpp", drafted, few, "llama.cpp")
    yield Peer("llama.cpp bf16", "xllamacpp", replace(plain, gguf=bf16), plain="llama.cpp bf16")
    yield Peer("llama.cpp bf16, lookup", "xllamacpp", replace(look, gguf=bf16), plain="llama.cpp bf16")
    yield Peer("llama.cpp, built here", "llama_cpp", plain, few, "llama.cpp, built here")
    yield Peer("openvino", "openvino_genai", plain, few, "openvino")
    yield Peer("openvino, prompt lookup", "openvino_genai", look, few, "openvino")
    if assistant_gguf:
        yield Peer("openvino, draft model", "openvino_genai", drafted, few, "openvino")


def _own(settings: Settings, drafters: Sequence[str], trees: Trees, eager: bool) -> Iterator[Peer]:
    settings = replace(settings, assistant="")
    for kind, usual in trees.items():
        said = kind or settings.dtype
        for compiled in (False,) if eager else (False, True) if kind is None else (True,):
            how = replace(settings, compile=compiled, weights=kind)
            end = f"{f', {kind}' if kind else ''}{', compiled' if compiled else ''}"
            plain = f"opt_tree plain{end}"
            yield Peer(plain, "opt_tree", how, said, plain)
            for named in drafters:
                spec, tree = parse_drafter(named)
                tree = tree or usual
                name = f"{spec}@{tree['nodes']}/{tree['threshold']}" if tree else spec
                yield Peer(f"opt_tree {name}{end}", "opt_tree", replace(how, drafter=spec, tree=tree), said, plain)


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
