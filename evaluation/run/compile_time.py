"""Compiling with a bar. How long a layer took on this machine is remembered, and says how long the next model takes."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from tqdm import tqdm

from opt_tree import CausalLM, Pair
from opt_tree.engines import package_cache


def compile_with_a_bar(pair: Pair, any_dtype: bool = False) -> None:
    """Compile what is not in the cache, and say how long it takes: before, where that is known, and after."""
    if pair.target.device.type != "cpu":
        pair.compile(any_dtype=any_dtype)
        return
    if pair.compile(make=False, any_dtype=any_dtype):
        return
    models = [lm for lm in (pair.target, *pair.drafter.models) if isinstance(lm, CausalLM)]  # others are not compiled
    configs = [lm.model.config.get_text_config() for lm in models if lm.engine.name == "eager"]
    layers = sum(int(getattr(config, "num_hidden_layers", 1)) for config in configs)
    facts = {"compiling": "seconds a layer", "torch": torch.__version__, "processor": package_cache.processor()}
    known = package_cache.remembered(facts)
    expected = layers * float(known) if known else None
    told = f"about {expected:.0f} s" if expected else "minutes"
    print(f"compiling {layers} layers for this CPU, once: {told}", flush=True)
    begin = time.monotonic()
    with _bar(expected):
        done = pair.compile(any_dtype=any_dtype)
    seconds = time.monotonic() - begin
    if done:
        print(f"compiled in {seconds:.0f} s; kept in {package_cache.cache_folder()}", flush=True)
        package_cache.remember(facts, f"{seconds / layers:.2f}")


@contextmanager
def _bar(expected: float | None) -> Iterator[None]:
    """Show on a terminal how much of the expected seconds has gone by; without an expectation, the seconds."""
    over, begin = threading.Event(), time.monotonic()
    shown = "{elapsed} |{bar}| {percentage:3.0f} %" if expected else "{elapsed}"

    def run(bar: tqdm) -> None:
        while not over.wait(0.5):
            bar.n = min(time.monotonic() - begin, expected or float("inf"))
            bar.refresh()

    with tqdm(total=expected, desc="compiling", bar_format=f"{{desc}} {shown}", leave=False, disable=None) as bar:
        ticking = threading.Thread(target=run, args=(bar,), daemon=True)
        ticking.start()
        try:
            yield
        finally:
            over.set()
            ticking.join()
