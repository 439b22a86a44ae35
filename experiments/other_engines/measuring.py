"""The measurement: every peer on every prompt, in turn; an answer is on disk before the next one is asked for."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Hashable, Sequence
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
        self._settings = asdict(settings)
        self._send({"engine": engine, "settings": self._settings, "cores": cores})
        self.load_seconds: float = self._receive()["load_seconds"]

    def ask(self, prompt: list[int], limit: int, settings: Settings | None = None) -> dict[str, Any]:
        """One greedy answer: its tokens, seconds, those to its first token, its steps, and the peak memory so far.

        `settings`: of a peer that shares the process of the one that it was started for.
        """
        self._send({"prompt": prompt, "limit": limit, "settings": asdict(settings) if settings else self._settings})
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
    share: bool = False
    """Whether peers that load the same weights are one process. Its memory is theirs together then."""


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
    plain: str = ""
    """The peer that decodes plainly with the same engine and weights."""


def measure(peers: Sequence[Peer], cores: list[int], *runs: Run) -> list[Measured]:
    """Start the peers on these cores, put every prompt to each of them in turn, and write the answers down."""
    found = [
        {peer.name: Measured(peer.name, len(cores), run.texts, peer.weights, plain=peer.plain) for peer in peers}
        for run in runs
    ]
    settings = {peer.name: peer.settings for peer in peers}
    running: dict[str, Process] = {}
    shared: dict[Hashable, Process] = {}
    shown = {"leave": False, "mininterval": 0.1 if sys.stderr.isatty() else 30.0}  # a log gets two lines a minute
    try:
        for peer in tqdm(peers, desc=f"starting, {len(cores)} cores", **shown):
            _try(found[0][peer.name], running, peer, cores, runs[0], shared)
        for run, measured in zip(runs, found, strict=True):
            for name, one in measured.items():
                one.load_seconds, one.failed = found[0][name].load_seconds, found[0][name].failed
            places = [*schedule(list(running), range(len(run.prompts)))] if running else []
            for name, index in tqdm(places, desc=f"asking, {len(cores)} cores", **shown):
                if name in running:
                    _ask(measured[name], running, index, run, settings[name])
    finally:
        for process in set(running.values()):
            process.close()
    return [one for measured in found for one in measured.values()]


def _try(
    measured: Measured,
    running: dict[str, Process],
    peer: Peer,
    cores: list[int],
    run: Run,
    shared: dict[Hashable, Process],
) -> None:
    """Start a peer and warm it up."""
    if (why := peer.missing) is None:
        try:
            process = shared.get(peer.loads) if run.share else None
            if process is None:
                process = shared[peer.loads] = Process(peer.engine, peer.settings, cores, run.timeout)
                measured.load_seconds = process.load_seconds
            running[peer.name] = process
            process.ask(run.prompts[0], 4, peer.settings)
            return
        except PeerError as error:
            why = str(error)
    _leave_out(measured, running, why)


def _ask(measured: Measured, running: dict[str, Process], index: int, run: Run, settings: Settings) -> None:
    try:
        answer = running[measured.name].ask(run.prompts[index], run.limit, settings)
    except PeerError as error:
        return _leave_out(measured, running, str(error))
    end = next((i for i, token in enumerate(answer["tokens"]) if token in run.stops), len(answer["tokens"]))
    answer["tokens"] = answer["tokens"][: min(end, run.limit)]
    measured.answers.append(answer)
    where = {"cores": measured.cores, "texts": measured.texts}
    line = {"peer": measured.name, **where, "prompt": index, "load_seconds": measured.load_seconds}
    line |= {"prompt_ids": run.prompts[index], "limit": run.limit}
    with run.output.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line | answer) + "\n")
    return None


def _leave_out(measured: Measured, running: dict[str, Process], why: str) -> None:
    """One line, and the others go on. What it answered so far does not count: it is of other prompts than theirs."""
    measured.failed, measured.answers = why, []
    tqdm.write(f"{measured.name} is left out: {why}", file=sys.stderr)
    process = running.pop(measured.name, None)
    if process and process not in running.values():
        process.close()
