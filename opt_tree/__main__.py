"""`opt-tree` or `python -m opt_tree` lists the library's commands; `opt-tree COMMAND ...` runs one."""

import ast
import difflib
import runpy
import sys
from pathlib import Path

from opt_tree.system.interrupted import as_command

COMMANDS = {
    "demo": "tools.display.demo",
    "models": "models.__main__",
    "advise": "training.advise",
    "prove": "tools.display.prove",
    "train-drafter": "training.train_drafter",
    "lm-eval": "integrations.lm_eval_model",
    "serve": "integrations.serve",
    "calibrate": "training.fitting.calibrate",
    "store": "training.fitting.store",
    "trim": "training.fitting.trim",
    "features": "training.heads.features",
    "train-head": "training.heads.train",
    "train-draft-length": "training.controllers.draft_length",
    "train-tree-values": "training.controllers.tree_values",
    "outputs": "training.outputs",
}
"""What a command is called here, and its module."""
CLONE = """In a clone there are also
    python demo_opt_classic.py, python demo_opt_eagle.py    watch it decode
    python -m examples.chat                                 a page to chat on
    python -m evaluation                                    lists what answers question sets, compares and measures"""


def main() -> int:
    """List the commands, or run the one that is named first. Returns 2, after one line, for one that there is not."""
    name, *rest = sys.argv[1:] or ["--help"]
    if name in ("-h", "--help"):
        with as_command():
            for command, module in COMMANDS.items():
                file = Path(__file__).parent / f"{module.replace('.', '/')}.py"
                about = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
                print(f"opt-tree {command:<18}  {about.partition(chr(10))[0]}")
            print(CLONE)
        return 0
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, 1)
        print(f"error: no command {name!r}" + (f"; did you mean {near[0]}?" if near else ""), file=sys.stderr)
        return 2
    sys.argv = [f"opt-tree {name}", *rest]
    runpy.run_module(f"opt_tree.{COMMANDS[name]}", run_name="__main__")  # up to the command's `main`, and no further
    return 0


if __name__ == "__main__":
    sys.exit(main())
