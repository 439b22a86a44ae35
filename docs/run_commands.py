"""Runs every command and block of code of the pages, and the examples, in a clean clone: status, seconds, differences.

    python docs/run_commands.py [README.md docs/batches.md ...] [--list] [--timeout 600]

Commands run at the top of a fresh clone of what is committed, blocks of Python in an empty folder, notebooks in
examples/. What is left out is listed with the reason. A notebook differs where a cell prints another text than is
stored, clocks aside. Exits with 1 if anything failed.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

ROOT = Path(__file__).resolve().parents[1]
PAGES = [
    *("README.md", "CONTRIBUTING.md", "evaluation/questions/README.md", "examples/custom_generate_repo/README.md"),
    *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").glob("*.md")),
    *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "opt_tree/models/embedded").rglob("*.md")),
    *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "examples").glob("*.ipynb")),
    *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "examples").glob("custom_*.py")),
]
LEFT_OUT = {
    r"^pip install": "changes the environment; .ci/run does it in a fresh one",
    r"meta-llama/": "13 GB behind a licence",
    r"accelerate launch": "starts several machines",
    r"-m pytest": "the test suite, which is run by itself",
    r"examples\.chat": "serves until it is stopped; tests/test_chat.py opens it in a browser",
    r"^opt-tree serve|evaluation\.audit": "a server until it is stopped, and others' texts; tests run both",
    r"--tasks TASKS": "tasks are one's own choice; tests/integrations/test_other_doors.py runs one",
    r"mt_bench|mt\.jsonl|speed_bench": "a question set of other people's, which is fetched first; an hour",
    r"opt_tree\.training\.": "names files that training wrote before; hours",
    r"path/or/hub-id": "names models of one's own; tests/integrations/test_other_doors.py runs it",
}
"""Patterns of commands that are not run, and why."""
CLOCK = re.compile(r"\d+(\.\d+)? (ms|s|tokens/s|times)\b")


@dataclass(frozen=True)
class Piece:
    """One thing that a reader would run."""

    page: str
    kind: str
    """command, python, notebook or script."""
    text: str

    @property
    def reason(self) -> str | None:
        """Why it is left out; None if it runs."""
        text = re.sub(r"#.*", "", self.text)
        return next((why for pattern, why in LEFT_OUT.items() if re.search(pattern, text)), None)

    @property
    def title(self) -> str:
        return self.text if self.kind == "command" else f"{self.kind}: {self.text.strip().splitlines()[0]}"


def pieces(page: str) -> Iterator[Piece]:
    """Yield what a page asks its reader to run, in its order."""
    if page.endswith((".ipynb", ".py")):
        yield Piece(page, "notebook" if page.endswith(".ipynb") else "script", page)
        return
    text = (ROOT / page).read_text(encoding="utf-8")
    for language, body in re.findall(r"^```(\w*)\n(.*?)^```", text, flags=re.M | re.S):
        if language == "python":
            yield Piece(page, "python", body)
        elif language in ("", "bash", "sh"):
            for line in body.replace("\\\n", " ").splitlines():
                for part in re.sub(r"\s+#.*", "", line).split("&&"):
                    if re.match(r"(python|pip|accelerate|opt-tree)\b", part.strip()):
                        yield Piece(page, "command", " ".join(part.split()))


def run(piece: Piece, clone: Path, empty: Path, timeout: float) -> tuple[bool, str]:
    """Run a piece; return whether it went well, and what there is to say of it."""
    if piece.kind == "notebook":
        return _notebook(clone / piece.page, timeout)
    place, words = clone, ["bash", "-c", piece.text]
    if piece.kind == "python":
        (empty / "block.py").write_text(piece.text, encoding="utf-8")
        place, words = empty, [sys.executable, "block.py"]
    elif piece.kind == "script":
        words = [sys.executable, piece.text]
    given = os.environ | {"PYTHONPATH": str(clone), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    try:
        done = subprocess.run(words, cwd=place, env=given, timeout=timeout, capture_output=True, text=True, check=False)
    except subprocess.TimeoutExpired:
        return False, f"not over after {timeout:g} s"
    said = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines()
    return done.returncode == 0, f"status {done.returncode}: {said[-1][:100] if said else 'no output'}"


def _notebook(path: Path, timeout: float) -> tuple[bool, str]:
    notebook = nbformat.read(path, as_version=4)
    before = [_printed(cell) for cell in notebook.cells]
    try:
        NotebookClient(notebook, timeout=timeout, resources={"metadata": {"path": str(path.parent)}}).execute()
    except CellExecutionError as error:
        return False, str(error).strip().splitlines()[-1]
    after = [_printed(cell) for cell in notebook.cells]
    apart = [place for place, (one, other) in enumerate(zip(before, after, strict=True)) if one != other]
    return True, f"{len(notebook.cells)} cells; texts differ in {apart or 'none'}"


def _printed(cell: nbformat.NotebookNode) -> str:
    outputs = [output for output in cell.get("outputs", []) if output.get("name") == "stdout"]
    return CLOCK.sub("", "".join(output["text"] for output in outputs))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("pages", nargs="*", help="by default all")
    parser.add_argument("--list", action="store_true", help="only say what there is")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for each (default: %(default)g)")
    given = parser.parse_args()
    failed = 0
    with tempfile.TemporaryDirectory() as scratch:
        clone, empty = Path(scratch, "clone"), Path(scratch, "empty")
        empty.mkdir()
        if not given.list:
            subprocess.run(["git", "clone", "-q", str(ROOT), str(clone)], check=True)
        for piece in (piece for page in given.pages or PAGES for piece in pieces(page)):
            begin = time.monotonic()
            went, said = True, piece.reason or ""
            if not (piece.reason or given.list):
                went, said = run(piece, clone, empty, given.timeout)
            failed += not went
            state = "left out" if piece.reason else "listed" if given.list else "ok" if went else "FAILED"
            print(
                f"{state:8}  {time.monotonic() - begin:6.1f} s  {piece.page}  {piece.title}\n{'':20}{said}", flush=True
            )
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
