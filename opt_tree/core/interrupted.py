"""Ctrl-C in the first seconds of a command, while it still imports: status 130 and no traceback, as later.

Owns nothing but Python's hook for what nobody caught, and that in a process that is a command of ours only. Imported
before everything else, so it imports nothing of the package.
"""

import sys
from pathlib import Path
from types import TracebackType


def is_command() -> bool:
    """Whether this process is one of our commands that is about to import what it needs.

    Python calls a module's process "-m" while it looks for the module, and its packages are imported then.
    """
    if sys.argv[:1] == ["-m"]:
        return any(word.removeprefix("-m").split(".")[0] in ("opt_tree", "evaluation") for word in sys.orig_argv[1:])
    return bool(sys.argv) and Path(sys.argv[0]).name.startswith("demo_opt_")


def _hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        raise SystemExit(130)
    sys.__excepthook__(kind, error, trace)


if is_command():
    sys.excepthook = _hook
