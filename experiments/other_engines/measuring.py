"""The measurement: every peer on every prompt, in turn; an answer is on disk before the next one is asked for."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tqdm import tqdm

from evaluation.timing import schedule
from experiments.other_engines.engines import Settings
from experiments.other_engines.registry import Peer


class PeerError(RuntimeError):
    """A peer crashed, hung or refused; the message is one line."""


class Process:
    """One engine on some of the machine's cores. `load_seconds` and `peak_mb` are known from the first answer on."""

    def __init__(self, engine: str, settings: Settings, cores: list[int], timeout: float) -> None:
        self._timeout = timeout
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the process
        environment = os.environ | {"OMP_NUM_THREADS": str(len(cores)), "TOKENIZERS_PARALLELISM": "false"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "experiments.other_engines.worker"],
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
        timer.daemon = True  # who is stopped waits for no timer
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


@dataclass(frozen=True)
class Run:
    """What is asked of all peers."""

    prompts: Sequence[list[int]]
    limit: int
    stops: frozenset[int]
    timeout: float
    output: Path
    texts: str = "chat"
    """Of what kind the prompts are."""


@dataclass
class Measured:
    """What one peer did on so many cores: an answer a prompt, or why there are none."""

    name: str
    cores: int
    texts: str = "chat"
    weights: str = ""
    load_seconds: float | None = None
    answers: list[dict[str, Any]] = field(default_factory=list)
    """By prompt: `tokens` without the stop token, `seconds`, `first_seconds`, `peak_mb`."""
    failed: str | None = None


def measure(peers: Sequence[Peer], cores: list[int], run: Run) -> list[Measured]:
    """Start the peers on these cores, put every prompt to each of them in turn, and write the answers down."""
    found = {peer.name: Measured(peer.name, len(cores), run.texts, peer.weights) for peer in peers}
    running: dict[str, Process] = {}
    shown = {"leave": False, "mininterval": 0.1 if sys.stderr.isatty() else 30.0}  # a log gets two lines a minute
    try:
        for peer in tqdm(peers, desc=f"starting, {len(cores)} cores", **shown):
            _try(found[peer.name], running, peer, cores, run)
        places = [(name, index) for name, index in schedule(list(running), range(len(run.prompts)))] if running else []
        for name, index in tqdm(places, desc=f"asking, {len(cores)} cores", **shown):
            if name in running:
                _ask(found[name], running, index, run)
    finally:
        for process in running.values():
            process.close()
    return list(found.values())


def _try(measured: Measured, running: dict[str, Process], peer: Peer, cores: list[int], run: Run) -> None:
    """Start a peer and warm it up."""
    if (why := peer.missing) is None:
        try:
            process = Process(peer.engine, peer.settings, cores, run.timeout)
            running[peer.name] = process
            process.ask(run.prompts[0], 4)
            measured.load_seconds = process.load_seconds
            return
        except PeerError as error:
            why = str(error)
    _leave_out(measured, running, why)


def _ask(measured: Measured, running: dict[str, Process], index: int, run: Run) -> None:
    try:
        answer = running[measured.name].ask(run.prompts[index], run.limit)
    except PeerError as error:
        return _leave_out(measured, running, str(error))
    end = next((i for i, token in enumerate(answer["tokens"]) if token in run.stops), len(answer["tokens"]))
    answer["tokens"] = answer["tokens"][: min(end, run.limit)]
    measured.answers.append(answer)
    where = {"cores": measured.cores, "texts": measured.texts}
    line = {"peer": measured.name, **where, "prompt": index, "load_seconds": measured.load_seconds}
    with run.output.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line | answer) + "\n")
    return None


def _leave_out(measured: Measured, running: dict[str, Process], why: str) -> None:
    """One line, and the others go on. What it answered so far does not count: it is of other prompts than theirs."""
    measured.failed, measured.answers = why, []
    tqdm.write(f"{measured.name} is left out: {why}", file=sys.stderr)
    if process := running.pop(measured.name, None):
        process.close()
