"""How a command ends that somebody stops: Ctrl-C while it still imports, and SIGTERM at any time.

Owns Python's hook for what nobody caught, in a process that is a command of ours only: in its first seconds Ctrl-C is
status 130 and no traceback, as later. Imported before everything else, so it imports nothing of the package.
"""

import os
import re
import select
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
    """Whether this process is one of our commands: `python -m` with a module of ours, a demo, or `opt-tree`."""
    module = re.search(r" -m ?(\w+)", " ".join(sys.orig_argv))
    script = Path(sys.argv[0]).name if sys.argv else ""
    return module[1] in OURS if module else script.startswith(("demo_opt_", "opt-tree"))


def _hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        print("stopped", file=sys.stderr)
        raise SystemExit(130)
    sys.__excepthook__(kind, error, trace)


def _terminated(*_: object) -> NoReturn:
    raise Terminated


def _ended(number: int, _: object) -> NoReturn:
    os.write(2, b"stopped\n")
    os._exit(128 + number)


@contextmanager
def at_once() -> Iterator[None]:
    """Let Ctrl-C and SIGTERM end a command on the spot: while it imports, which may swallow an exception."""
    before = {number: signal.signal(number, _ended) for number in (signal.SIGINT, signal.SIGTERM)} if COMMAND else {}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _nobody_reads() -> bool:
    """Whether stdout is a pipe that broke, as behind `| head -1`."""
    poll = select.poll()
    poll.register(sys.stdout, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


@contextmanager
def as_command() -> Iterator[None]:
    """Let SIGTERM end what runs as Ctrl-C does (locks and temporary files go), and make each warning one line.

    A pipe that nobody reads any more ends it quietly.
    """
    formatting = warnings.formatwarning
    warnings.formatwarning = lambda message, *_, **__: f"note: {message}\n"
    # Of several processes the launcher ends all, and none waits for the others then. Threads get no signals.
    alone = "WORLD_SIZE" not in os.environ and threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGTERM, _terminated) if alone else None
    try:
        yield
        sys.stdout.flush()  # here, and not where Python ends
    except BrokenPipeError:
        if not _nobody_reads():
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what Python still writes at its end
        raise SystemExit(128 + signal.SIGPIPE) from None
    finally:
        warnings.formatwarning = formatting
        if alone:
            signal.signal(signal.SIGTERM, before)


COMMAND = is_command()
if COMMAND:
    sys.excepthook = _hook
