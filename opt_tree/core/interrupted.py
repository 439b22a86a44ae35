"""How a command ends that somebody stops: Ctrl-C while it still imports, and SIGTERM at any time.

Owns Python's hook for what nobody caught, in a process that is a command of ours only: in its first seconds Ctrl-C is
status 130 and no traceback, as later. Imported before everything else, so it imports nothing of the package.
"""

import os
import signal
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import NoReturn

OURS = ("opt_tree", "evaluation", "experiments", "examples")


class Terminated(SystemExit):
    """SIGTERM came."""

    def __init__(self) -> None:
        super().__init__(128 + signal.SIGTERM)


def is_command() -> bool:
    """Whether this process is one of our commands that is about to import what it needs.

    Python calls a module's process "-m" while it looks for the module, and its packages are imported then.
    """
    if sys.argv[:1] == ["-m"]:
        return any(word.removeprefix("-m").split(".")[0] in OURS for word in sys.orig_argv[1:])
    return bool(sys.argv) and Path(sys.argv[0]).name.startswith(("demo_opt_", "opt-tree"))


def _hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        print("stopped", file=sys.stderr)
        raise SystemExit(130)
    sys.__excepthook__(kind, error, trace)


def _terminated(*_: object) -> NoReturn:
    raise Terminated


@contextmanager
def as_command() -> Iterator[None]:
    """Let SIGTERM end what runs as Ctrl-C does (locks and temporary files go), and make each warning one line."""
    formatting = warnings.formatwarning
    warnings.formatwarning = lambda message, *_, **__: f"note: {message}\n"
    # Of several processes the launcher ends all, and none waits for the others then. Threads get no signals.
    alone = "WORLD_SIZE" not in os.environ and threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGTERM, _terminated) if alone else None
    try:
        yield
    finally:
        warnings.formatwarning = formatting
        if alone:
            signal.signal(signal.SIGTERM, before)


if is_command():
    sys.excepthook = _hook
