"""The measurement: every peer on every prompt, in turn; an answer is on disk before the next one is asked for."""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tqdm import tqdm

from evaluation.peers.process import PeerError, Process
from evaluation.peers.registry import Peer
from evaluation.timing import schedule


@dataclass(frozen=True)
class Run:
    """What is asked of all peers."""

    prompts: Sequence[list[int]]
    limit: int
    stops: frozenset[int]
    timeout: float
    output: Path


@dataclass
class Measured:
    """What one peer did on so many cores: an answer a prompt, or why there are none."""

    name: str
    cores: int
    load_seconds: float | None = None
    answers: list[dict[str, Any]] = field(default_factory=list)
    """By prompt: `tokens` without the stop token, `seconds`, `first_seconds`, `peak_mb`."""
    failed: str | None = None


def measure(peers: Sequence[Peer], cores: list[int], run: Run) -> list[Measured]:
    """Start the peers on these cores, put every prompt to each of them in turn, and write the answers down."""
    found = {peer.name: Measured(peer.name, len(cores)) for peer in peers}
    running: dict[str, Process] = {}
    try:
        for peer in tqdm(peers, desc=f"starting, {len(cores)} cores", leave=False, disable=None):
            _try(found[peer.name], running, peer, cores, run)
        places = [(name, index) for name, index in schedule(list(running), range(len(run.prompts)))] if running else []
        for name, index in tqdm(places, desc=f"asking, {len(cores)} cores", leave=False, disable=None):
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
    line = {"peer": measured.name, "cores": measured.cores, "prompt": index, "load_seconds": measured.load_seconds}
    with run.output.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line | answer) + "\n")
    return None


def _leave_out(measured: Measured, running: dict[str, Process], why: str) -> None:
    """One line, and the others go on. What it answered so far does not count: it is of other prompts than theirs."""
    measured.failed, measured.answers = why, []
    tqdm.write(f"{measured.name} is left out: {why}", file=sys.stderr)
    if process := running.pop(measured.name, None):
        process.close()
