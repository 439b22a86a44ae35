"""Change the library in small ways, one at a time, and say which test notices: a change that none notices lacks one.

    python tests/mutations.py                   # thirty changes, most of them noticed within seconds
    python tests/mutations.py --seed 1 --count 5

The tests of the quick tier run in a copy of the checkout, in three stages, until one fails: files with the module's
name, files that name it or something in it, the rest; in each those of the same folder first. Changes are picked by a
hash of the seed, the line and the change: a commit elsewhere leaves the others as they were. Docstrings, annotations,
decorators and the texts of errors are left alone, and so is `cuda_graphs`, which runs on a GPU only.
"""

import argparse
import ast
import hashlib
import itertools
import multiprocessing
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Bytecode of a file before it was changed must not be taken for that of the file after.
os.environ |= {"HF_HUB_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": "1"}
sys.dont_write_bytecode = True

import pytest  # noqa: E402
import torch  # noqa: E402, F401
import transformers  # noqa: E402, F401

ROOT = Path(__file__).parents[1]
FOLDERS = ("", "methods/policies", "methods/verifiers", "backends")
"""The core, which lies in none, and others."""
KINDS = ("operator", "comparison", "constant", "statement")
OPERATORS: dict[type[ast.AST], Any] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv, ast.And: ast.Or, ast.Or: ast.And, ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE,
    ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}  # fmt: skip


@dataclass(frozen=True)
class Mutation:
    """Bytes `begin` to `end` of a file, and what stands there instead."""

    kind: str
    file: Path
    begin: int
    end: int
    line: str
    old: str
    new: str

    def __str__(self) -> str:
        return f"{self.file.relative_to(ROOT)}: {self.line}\n    {self.old}  ->  {self.new}"


def replaced(node: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield the kinds of change, and what may stand in the place of this node."""
    match node:
        case ast.Compare(left, [op], [right]) if type(op) in OPERATORS:
            yield "comparison", f"({ast.unparse(ast.Compare(left, [OPERATORS[type(op)]()], [right]))})"
        case ast.BinOp(left, op, right) if type(op) in OPERATORS:
            yield "operator", f"({ast.unparse(ast.BinOp(left, OPERATORS[type(op)](), right))})"
        case ast.BoolOp(op, values):
            yield "operator", f"({ast.unparse(ast.BoolOp(OPERATORS[type(op)](), values))})"
        case ast.UnaryOp(ast.Not(), operand):
            yield "comparison", f"({ast.unparse(operand)})"
        case ast.Constant(bool() as value):
            yield "constant", str(not value)
        case ast.Constant(int() | float() as value):
            yield "constant", f"({value + 1})"
        case ast.Expr(ast.Call()) | ast.AugAssign() | ast.Assign([ast.Attribute() | ast.Subscript()]) | ast.Raise():
            yield "statement", "pass"


def parts(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the children of a node that the program runs, without the texts for people."""
    skipped = {"annotation", "returns", "decorator_list", "exc", "cause", "msg", "type_params"}
    for name, value in ast.iter_fields(node):
        if name not in skipped and not isinstance(node, ast.JoinedStr):
            yield from (one for one in (value if isinstance(value, list) else [value]) if isinstance(one, ast.AST))


def mutations(file: Path) -> Iterator[Mutation]:
    """Yield every mutation of a module."""
    source = file.read_bytes()
    lines = source.splitlines(keepends=True)

    def place(line: int, column: int) -> int:
        return sum(map(len, lines[: line - 1])) + column

    def visit(node: ast.AST) -> Iterator[Mutation]:
        for kind, new in replaced(node):
            begin, end = place(node.lineno, node.col_offset), place(node.end_lineno, node.end_col_offset)  # type: ignore[attr-defined]
            line = lines[node.lineno - 1].decode().strip()  # type: ignore[attr-defined]
            yield Mutation(kind, file, begin, end, line, source[begin:end].decode(), new)
        for part in parts(node):
            yield from visit(part)

    yield from visit(ast.parse(source))


def picked(seed: int, count: int) -> list[Mutation]:
    """Return `count` mutations of the folders, the kinds by turns; the same ones for the same seed."""
    files = (file for folder in FOLDERS for file in sorted((ROOT / "opt_tree" / folder).glob("*.py")))
    every = [mutation for file in files if file.stem != "cuda_graphs" for mutation in mutations(file)]
    by_hash = {hashlib.sha256(f"{seed} {mutation}".encode()).digest(): mutation for mutation in every}
    by_kind = ([mutation for _, mutation in sorted(by_hash.items()) if mutation.kind == kind] for kind in KINDS)
    by_turns = (mutation for turn in itertools.zip_longest(*by_kind) for mutation in turn if mutation)
    return list(itertools.islice(by_turns, count))


def stages(mutation: Mutation, tests: Path) -> Iterator[list[str]]:
    """Yield the test files of each stage, those likely to notice first: of the module's name, of its words, all."""
    named = {node.name for node in ast.parse(mutation.file.read_bytes()).body if hasattr(node, "name")}
    words = re.compile(rf"\b({'|'.join({mutation.file.stem, *named})})\b")
    place = mutation.file.parent
    folder = tests / ("core" if place == ROOT / "opt_tree" else place.name)
    files = sorted(tests.rglob("test_*.py"), key=lambda file: (file.parent != folder, file.stat().st_size))
    own = [file for file in files if file.stem.startswith(f"test_{mutation.file.stem}")]
    near = [file for file in files if file not in own and words.search(file.read_text())]
    rest = [file for file in files if file not in own and file not in near]
    yield from ([str(file) for file in stage] for stage in (own, near, rest) if stage)


def run(copy: Path, files: list[str], log: Path) -> None:
    """Run the tests in this process, which is a fork: torch is imported once for all mutations."""
    os.chdir(copy)
    with log.open("w") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
        sys.exit(pytest.main(["-x", "-n0", "--timeout=120", "-p", "no:cacheprovider", *files]))


def noticed(mutation: Mutation, copy: Path) -> str:
    """Return the test that fails under this mutation, or "nobody"."""
    file, source = copy / mutation.file.relative_to(ROOT), mutation.file.read_bytes()
    log = copy.parent / "log.txt"
    file.write_bytes(source[: mutation.begin] + mutation.new.encode() + source[mutation.end :])
    try:
        for files in stages(mutation, copy / "tests"):
            process = multiprocessing.get_context("fork").Process(target=run, args=(copy, files, log))
            process.start()
            process.join()
            if process.exitcode:
                found = re.findall(r"^(?:FAILED|ERROR) (?:tests/)?(\S+)", log.read_text(), flags=re.MULTILINE)
                return found[0] if found else f"the run itself, status {process.exitcode}"
        return "nobody"
    finally:
        file.write_bytes(source)


def main() -> None:
    """Print a line for every mutation; fail if nobody notices one of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=30)
    options = parser.parse_args()
    missed = 0
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "checkout"
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".*_cache", "__pycache__"), symlinks=True)
        for mutation in picked(options.seed, options.count):
            test = noticed(mutation, copy)
            missed += test == "nobody"
            print(f"{mutation}\n    noticed by {test}", flush=True)
    sys.exit(f"{missed} mutations that nobody notices" if missed else None)


if __name__ == "__main__":
    main()
