"""The process of one peer: started, told its engine in one line, then a line a prompt and a line an answer.

Foreign engines crash, print and keep threads. Here they do it alone; `measuring` is the other end.
"""

import json
import os
import re
import sys
import time
from pathlib import Path
from typing import Any, TextIO

from evaluation.command_line import Parser, run_command


def peak_mb() -> float:
    """Peak memory of this process, in MB of 1,024 kB. `getrusage` would say its parent's where that is larger."""
    found = re.search(r"^VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text(), flags=re.M)
    assert found is not None, "Linux says it"
    return int(found[1]) / 1024


def serve(questions: TextIO, answers: TextIO) -> None:
    """Start the engine that the first line names, then answer a prompt a line until the input ends."""
    begin = time.perf_counter()
    told = json.loads(questions.readline())
    os.sched_setaffinity(0, told["cores"])  # before any library counts the cores
    from experiments.other_engines.engines import ENGINES, Clock, Settings

    def say(found: dict[str, Any]) -> None:
        answers.write(json.dumps(found | {"peak_mb": peak_mb()}) + "\n")
        answers.flush()

    made = {json.dumps(told["settings"]): ENGINES[told["engine"]](Settings(**told["settings"]))}
    say({"load_seconds": time.perf_counter() - begin})
    for line in questions:
        asked = json.loads(line)
        if (how := json.dumps(asked["settings"])) not in made:  # another peer that shares the process
            made[how] = ENGINES[told["engine"]](Settings(**asked["settings"]))
        clock = Clock()
        tokens = list(made[how](asked["prompt"], asked["limit"], clock))
        seconds = time.perf_counter() - clock.begin
        say({"tokens": tokens, "seconds": seconds, "first_seconds": clock.first, "steps": clock.steps})


def main(arguments: list[str] | None = None) -> int:
    """Serve who started this process. Whatever an engine prints goes to stderr: stdout is the line to the parent."""

    def command() -> int:
        Parser("python -m experiments.other_engines.worker", __doc__).parse_args(arguments)
        with os.fdopen(os.dup(sys.stdout.fileno()), "w") as stdout:
            os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
            serve(sys.stdin, stdout)
        return 0

    return run_command(command)


if __name__ == "__main__":
    sys.exit(main())
