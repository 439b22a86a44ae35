"""Commands of this package run one after another, each in a process of its own, with one bar over all of them.

Owns the clock of such a run, which goes on after it was killed, and what becomes of a command that fails.
"""

import argparse
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from opt_tree.core.files import write_text

STATE, LOG = "run.json", "log.txt"


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Keep other runs out of a folder. ValueError where one is at work."""
    lock = FileLock(folder / ".lock")
    try:
        lock.acquire(timeout=0)
    except Timeout as error:
        raise ValueError(f"another run is at work in {folder}") from error
    try:
        yield
    finally:
        lock.release()


@dataclass
class Work:
    """A run: where it is, and how long it has been."""

    args: argparse.Namespace
    state: dict[str, Any]
    bar: Any = field(repr=False)

    @property
    def left(self) -> float:
        """Seconds until the minutes are over."""
        return 60 * self.args.minutes - self.state["seconds"]

    def save(self) -> None:
        write_text(self.args.output / STATE, json.dumps(self.state, indent=1) + "\n")

    def run(self, what: str, seconds: float, module: str, *words: object) -> str:
        """Run one of the package's commands; show what it does and until when; return what it said.

        Raises ValueError with its last line where it fails.
        """
        log, end = self.args.output / LOG, time.strftime("%H:%M", time.localtime(time.time() + max(seconds, 0)))
        over = time.strftime("%H:%M", time.localtime(time.time() + max(self.left, seconds)))
        self.bar.set_description_str(f"{what}, until {end}; all until {over}")
        asked = [sys.executable, "-m", f"opt_tree.{module}", *map(str, words)]
        with log.open("ab") as file:
            file.write(f"\n$ {' '.join(asked[2:])}\n".encode())
            file.flush()
            begin, then = file.tell(), time.monotonic()
            with subprocess.Popen(asked, stdout=file, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL) as child:
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
