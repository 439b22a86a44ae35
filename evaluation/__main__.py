"""`python -m evaluation` lists the commands."""

import ast
import sys
from pathlib import Path

from opt_tree.core.interrupted import as_command

COMMANDS = {
    **{name: f"{name}.py" for name in ("eval_opt_classic", "eval_opt_eagle", "report", "exactness", "acceptance")},
    "latency": "latency.py",
    **{name: f"{name}/__main__.py" for name in ("compare", "demo")},
}


def main() -> None:
    """Print each command with the first line of its documentation; nothing of it is imported."""
    for name, file in COMMANDS.items():
        about = ast.get_docstring(ast.parse((Path(__file__).parent / file).read_text())) or ""
        print(f"python -m evaluation.{name}\n    {about.partition(chr(10))[0]}")


if __name__ == "__main__":
    with as_command():
        main()
    sys.exit()
