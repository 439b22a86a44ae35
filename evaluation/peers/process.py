"""A peer in a process of its own, as its parent sees it: asked and answered in lines, and one line when it dies."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from dataclasses import asdict
from pathlib import Path
from typing import Any

from evaluation.peers.engines import Settings


class PeerError(RuntimeError):
    """A peer crashed, hung or refused; the message is one line."""


class Process:
    """One engine on some of the machine's cores. `load_seconds` and `peak_mb` are known from the first answer on."""

    def __init__(self, engine: str, settings: Settings, cores: list[int], timeout: float) -> None:
        self._timeout = timeout
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the process
        environment = os.environ | {"OMP_NUM_THREADS": str(len(cores)), "TOKENIZERS_PARALLELISM": "false"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "evaluation.peers.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env=environment,
            cwd=Path(__file__).parents[2],
        )
        self._send({"engine": engine, "settings": asdict(settings), "cores": cores})
        self.load_seconds: float = self._receive()["load_seconds"]

    def ask(self, prompt: list[int], limit: int) -> dict[str, Any]:
        """One greedy answer: its tokens, its seconds, those to its first token, and the peak memory so far."""
        self._send({"prompt": prompt, "limit": limit})
        return self._receive()

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()
        self._errors.close()

    def _send(self, what: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(what) + "\n")
            self._process.stdin.flush()
        except OSError as error:
            raise PeerError(self._last_words()) from error

    def _receive(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        timer = threading.Timer(self._timeout, self._process.kill)
        timer.start()
        line = self._process.stdout.readline()
        late = not timer.is_alive()
        timer.cancel()
        if not line:
            raise PeerError(f"no answer in {self._timeout:g} s" if late else self._last_words())
        return json.loads(line)

    def _last_words(self) -> str:
        """Why it ended: the signal, or the last line that it wrote."""
        status = self._process.wait(timeout=60)
        self._errors.seek(0)
        lines = [line for line in self._errors.read().decode(errors="replace").splitlines() if line.strip()]
        if status < 0:
            return f"died of {signal.Signals(-status).name}"
        return lines[-1].strip()[:200] if lines else f"ended with status {status}"
