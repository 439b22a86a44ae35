"""Packages that nothing was compiled for: a note on the disk, and in its place the exported program."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from opt_tree.backends import compiled as aot
from opt_tree.backends.body import Body
from opt_tree.backends.package_cache import facts_of

_EXPORTED: dict[str, torch.export.ExportedProgram] = {}
"""A tracing takes a second: programs by what decides them. Their weights are their own, whatever becomes of a model."""


def install(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Put them in the compiler's place; return the list of what was "compiled"."""
    made: list[str] = []
    export = aot.export
    programs: dict[str, Any] = {}

    def export_once(body: Body, inputs: dict[str, Any]) -> torch.export.ExportedProgram:
        masks = [*inputs["mask"]] if isinstance(inputs["mask"], dict) else []
        asked = str((facts_of(body.model), body.layers, masks))
        if asked not in _EXPORTED:
            _EXPORTED[asked] = export(Body(copy.deepcopy(body.model), body.layers), inputs)
        return _EXPORTED[asked]

    def compile_nothing(program: torch.export.ExportedProgram, file: Path, options: dict[str, Any]) -> None:
        made.append(str(file))
        programs[made[-1]] = program
        file.write_text(made[-1])

    def load(file: Path, shared: dict[str, Tensor]) -> Callable[[list[Tensor]], list[Tensor]]:
        program = programs[file.read_text()]
        graph = program.module()

        def call(flat: list[Tensor]) -> list[Tensor]:
            _, inputs = torch.utils._pytree.tree_unflatten(flat, program.call_spec.in_spec)
            return list(graph(**inputs))

        return call

    monkeypatch.setattr(aot, "export", export_once)
    monkeypatch.setattr(aot, "_compile", compile_nothing)
    monkeypatch.setattr(aot, "_load", load)
    return made
