"""A load on `opt-tree serve`: are its answers the decoder's, what is its memory, does it end as it is told to?

    python -m experiments.server_load [--requests 200] [--more 800] [--clients 8]

Starts a server of the demo pair in float32. Clients ask it at once, every second one for a stream, each in its turn for
another question, drafter, tree, temperature and seed. Every answer is compared with `Decoder.generate`'s, token by
token. Then one client leaves in the middle of an answer, and SIGTERM comes in the middle of another.
"""

import sys
from dataclasses import dataclass

from evaluation.command_line import check_bounds, main_of, option


@dataclass(frozen=True)
class Options:
    """How much is asked for."""

    requests: int = option(200, "whole answers", least=1)
    max_new_tokens: int = option(24, "of these", least=1)
    more: int = option(800, "answers of six tokens behind them, after which memory is looked at again", least=0)
    clients: int = option(8, "that ask at once", least=1)
    lanes: int = option(4, "requests that are decoded at a time", least=1)
    json: bool = option(False, "print the figures as one JSON line, too")

    def __post_init__(self) -> None:
        check_bounds(self)


main = main_of("experiments.server_load", Options, __doc__, "experiments.server_load:run")

if __name__ == "__main__":
    sys.exit(main())

import json
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from typing import Any

import httpx
import psutil

from evaluation.command_line import print_json, table
from evaluation.questions.sets import load_set
from opt_tree import Decoder, OptTree, Sampling, Static, load_pair
from opt_tree.methods.drafters.registry import DrafterOptions, load_drafter
from opt_tree.methods.policies.registry import make_policy

DRAFTERS = ("eagle:demo", "lm:demo", "ngram")
TREES: tuple[dict[str, Any], ...] = ({"nodes": 6, "threshold": 0.2}, {"policy": "eagle2", "nodes": 8}, {"nodes": 0})
CASES = 36
"""Different requests: questions, drafters, trees and temperatures in turn."""
LONG = {"prompt": "Once upon a time", "max_tokens": 400, "tree": {"nodes": 0}, "stream": True}
SHORT = 6


@contextmanager
def serving(options: Options) -> Iterator[tuple[subprocess.Popen[bytes], httpx.Client]]:
    """A server in a process of its own, and a client of it."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    drafters = [word for spec in DRAFTERS for word in ("--drafter", spec)]
    limits = ("--lanes", str(options.lanes), "--queue", str(options.clients))
    command = ["-m", "opt_tree", "serve", "demo", "--dtype", "float32", "--port", str(port), *drafters, *limits]
    process = subprocess.Popen([sys.executable, *command], stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=600) as client:
            while True:
                if process.poll() is not None:
                    raise ValueError(f"the server ended with status {process.returncode}: {' '.join(command)}")
                try:
                    client.get("/v1/models")
                    break
                except httpx.ConnectError:
                    time.sleep(0.2)
            yield process, client
    finally:
        process.kill()
        process.wait()


def request_of(case: int) -> dict[str, Any]:
    """One of the cases, as a request."""
    question = load_set("demo").questions[case % 12].turns[0]
    tree = TREES[case // 3 % len(TREES)]
    given = {
        "drafter": DRAFTERS[case % len(DRAFTERS)],
        "tree": tree,
        "temperature": 0.8 * (case // 2 % 2),
        "seed": case,
    }
    return {"model": "demo", "messages": [{"role": "user", "content": question}], "logprobs": True, **given}


def asked(client: httpx.Client, case: int, most: int, stream: bool) -> list[str]:
    """The tokens of an answer. Raises ValueError for a status that is no success."""
    body = {**request_of(case), "max_tokens": most, "stream": stream}
    answer = client.post("/v1/chat/completions", json=body)
    if answer.status_code != 200:
        raise ValueError(f"status {answer.status_code}: {answer.text}")
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line] if stream else [answer.text]
    told = [json.loads(line)["choices"][0]["logprobs"] for line in lines if line != "[DONE]"]
    return [place["token"] for one in told if one for place in one["content"]]


class Reference:
    """What `Decoder.generate` writes."""

    def __init__(self, most: int) -> None:
        self._pair, self._most = load_pair("demo", DRAFTERS[0], dtype="float32"), most
        options = DrafterOptions(self._pair.tokenizer)
        others = {spec: load_drafter(spec, self._pair.target, options) for spec in DRAFTERS[1:]}
        self._drafters = {DRAFTERS[0]: self._pair.drafter, **others}

    @cache  # noqa: B019 - one reference a process
    def tokens(self, case: int) -> list[str]:
        """The tokens of a case's answer, as the server writes them."""
        asked, pair = request_of(case), self._pair
        tree, drafter = asked["tree"], self._drafters[asked["drafter"]]
        policy = Static.empty()
        if tree["nodes"]:
            own = "policy" in tree
            policy = make_policy(tree["policy"], tree["nodes"]) if own else OptTree(tree["nodes"], tree["threshold"])
        decoder = Decoder(pair.target, drafter if tree["nodes"] else None, policy)
        prompt, sampling = pair.encode(asked["messages"]), Sampling(asked["temperature"])
        found = decoder.generate(prompt, self._most, sampling, pair.stop, seed=asked["seed"])
        return [str(pair.tokenizer.decode([token])) for token in found.tokens]


def run(options: Options) -> int:
    """Ask, compare, print; 1 where an answer is another one, or the server does not end as it should."""
    reference = Reference(options.max_new_tokens)
    figures: list[dict[str, Any]] = []
    with serving(options) as (process, client), ThreadPoolExecutor(options.clients) as pool:
        memory = psutil.Process(process.pid)
        for count, most in ((options.requests, options.max_new_tokens), (options.more, SHORT)):
            answers = pool.map(lambda n, most=most: asked(client, n % CASES, most, bool(n % 2)), range(count))
            equal = sum(found == reference.tokens(n % CASES)[:most] for n, found in enumerate(answers))
            figures.append({"requests": count, "tokens at most": most, "equal to Decoder's": equal})
            figures[-1]["server's RSS, MB"] = memory.memory_info().rss / 1e6
        with client.stream("POST", "/v1/completions", json={"model": "demo", **LONG}) as left:
            next(left.iter_lines())
        seconds, begin = 0.0, time.monotonic()
        while under_way(client) and seconds < 60:
            seconds = time.monotonic() - begin
        with client.stream("POST", "/v1/completions", json={"model": "demo", **LONG}) as stream:
            lines = stream.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            drained = [line for line in lines if line][-1] == "data: [DONE]"
        status = process.wait(60)
    print(table(figures))
    print(f"a client that left: its work ended after {seconds:.1f} s; SIGTERM in a stream: "
          f"{'it was written to its end' if drained else 'it was cut'}, exit status {status}")  # fmt: skip
    ends = {"left": seconds, "drained": drained, "status": status}
    print_json(options.json, {"load": figures, **ends})
    whole = all(row["requests"] == row["equal to Decoder's"] for row in figures)
    return int(not (whole and drained and seconds < 60))


def under_way(client: httpx.Client) -> int:
    """How many texts the server decodes or lets wait."""
    return client.get("/v1/models").json()["data"][0]["opt_tree"]["under_way"]
