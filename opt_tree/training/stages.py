"""Commands of this package run one after another, each in a process of its own, with one bar over all of them.

Owns the clock of such a run, which goes on after it was killed, and what becomes of a command that fails.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from filelock import lock_descriptor

from opt_tree.system.files import write_text

STATE, LOG = "run.json", "log.txt"


@contextmanager
def alone_in(folder: Path) -> Iterator[int]:
    """Keep other runs out of a folder; give the lock's file descriptor. ValueError where one is at work.

    The folder is free when the last process with this descriptor has ended.
    """
    with (folder / ".lock").open("ab") as file:
        if not lock_descriptor(file.fileno(), blocking=False):
            raise ValueError(f"another run is at work in {folder}, or a command that it began")
        yield file.fileno()


@dataclass
class StagedRun:
    """A run: where it is, and how long it has been."""

    args: argparse.Namespace
    state: dict[str, Any]
    bar: Any = field(repr=False)
    lock: int | None = None
    """What `alone_in` gave. Each command holds it as well: it may go on where this process is killed."""

    def save(self) -> None:
        write_text(self.args.output / STATE, json.dumps(self.state, indent=1) + "\n")

    def run(self, what: str, seconds: float, module: str, *words: object) -> str:
        """Run one of the package's commands; show what it does and until when; return what it said.

        Raises ValueError with its last line where it fails.
        """
        log, end = self.args.output / LOG, time.strftime("%H:%M", time.localtime(time.time() + max(seconds, 0)))
        left = 60 * self.args.minutes - self.state["seconds"]  # until the minutes are over
        over = time.strftime("%H:%M", time.localtime(time.time() + max(left, seconds)))
        self.bar.set_description_str(f"{what}, until {end}; all until {over}")
        asked = [sys.executable, "-m", f"opt_tree.{module}", *map(str, words)]
        with log.open("ab") as file:
            file.write(f"\n$ {' '.join(asked[2:])}\n".encode())
            file.flush()
            begin, then = file.tell(), time.monotonic()
            where = {"stdout": file, "stderr": subprocess.STDOUT, "stdin": subprocess.DEVNULL}
            if self.lock is not None and os.name == "posix":  # elsewhere no descriptor can be handed on
                where["pass_fds"] = (self.lock,)
            with subprocess.Popen(asked, **where) as child:
                try:
                    while child.poll() is None:
                        time.sleep(0.5)
                        now = time.monotonic()
                        self.state["seconds"] += now - then
                        self.bar.update(min(now - then, self.bar.total - self.bar.n))
                        then = now
                        self.save()
                except BaseException:
                    child.terminate()
                    raise
        with log.open("rb") as file:
            file.seek(begin)
            said = file.read().decode(errors="replace")
        if child.returncode:
            last = re.split(r"[\r\n]+", said.strip())[-1].removeprefix("error: ")
            raise ValueError(f"{what} failed: {last} (all of it is in {log})")
        return said
