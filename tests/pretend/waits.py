"""How often the host waits in a step, and what it launches, by drafter: the table of docs/devices.md.

    python tests/pretend/waits.py [DRAFTER ...]

On the pretended device, with the embedded models in float32, greedy, OPT-Tree of 60 nodes. A wait is a read by the host
or an upload that blocks; each costs a round trip, during which the device has nothing to do. A launch is a kernel, a
copy or the replay of a graph; captured, as `compile=True` makes the pair, a forward is one replay. A second table has
the steps that stay on the device (`opt_tree.tools.on_device`), of the drafters that can; idle are waits of these behind
which nothing was launched.
"""

import sys
import warnings
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1])]
import opt_tree  # noqa: E402
from opt_tree.models.compiling import compile_forwards  # noqa: E402
from opt_tree.tools.on_device import on_device  # noqa: E402
from opt_tree.tools.presets import plain  # noqa: E402
from pretend import plugin  # noqa: E402, F401
from pretend.device import Log, logged  # noqa: E402

DRAFTERS = {
    **{"lm": "lm:demo", "eagle": "eagle:demo", "eagle3": "eagle3:demo", "exit": "exit:demo"},
    **{"parallelspec": "parallelspec:demo", "dspark": "dspark:demo"},
    **{"store": "store:demo", "ngram": "ngram", "recycling": "recycling"},
    **{"copy": "copy:eagle:demo", "graft": "graft:1:eagle:demo+store:demo"},
    **{"rasd": "rasd:eagle:demo+store:demo"},
}
ON_DEVICE = ("lm", "eagle", "eagle3", "parallelspec", "dspark", "store", "graft")
"""Drafters whose steps can stay there; `ngram` and `copy` can, too."""
POLICY = opt_tree.OptTree(nodes=60, threshold=0.2)
STEPS = 4
BUCKETS = opt_tree.Buckets((1, 8, 16, 32, 64), (512,))


class Waits(NamedTuple):
    """Means over some steps."""

    layers: float
    waits: float
    uploads: float
    draft_launches: float
    verify_launches: float
    idle: float = 0
    """Waits of steps on the device behind which nothing was launched."""


def pair_with(spec: str, captured: bool = False) -> Any:
    """The embedded target on the device, with a drafter; their forwards captured, or not."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pair = opt_tree.load_pair("demo", drafter=spec, dtype="float32", device="cuda")
        for lm in (pair.target, *pair.drafter.models) if captured else ():
            compile_forwards(lm, buckets=BUCKETS)
    return pair


def measure(pair: Any, sampling: Any = None, apart: bool = True) -> Waits:
    """Count over steps in the middle of a text.

    `apart`: launches of the verification, which are those of a plain step, are not counted as the draft's.
    """
    sampling = sampling or opt_tree.Sampling()
    prompt = pair.encode("Tell me a short story about a fox and a lantern.")
    decoders = [opt_tree.Decoder(pair.target, pair.drafter, POLICY), *([plain(pair.target)] if apart else [])]
    if pair.target.buckets:  # a shape is captured when it first comes
        for one in decoders:
            counted(one, prompt, sampling)
    (layers, log), *alone = [counted(one, prompt, sampling) for one in decoders]
    launches, verify = log.kernels.total() / STEPS, sum(one.kernels.total() for _, one in alone) / STEPS
    return Waits(layers, log.waits / STEPS, log.uploads.total() / STEPS, max(launches - verify, 0), verify)


def measure_on_device(pair: Any, sampling: Any = None) -> Waits:
    """Count over steps that stay on the device; all launches together, in the place of the draft's."""
    sampling = sampling or opt_tree.Sampling()
    prompt = pair.encode("Tell me a short story about a fox and a lantern.")
    decoder = on_device(opt_tree.Decoder(pair.target, pair.drafter, POLICY))
    if pair.target.buckets:  # a shape's second step is captured, and keys outgrow a shape
        list(islice(decoder.steps(prompt, 200, sampling, stop=None), 2 * STEPS + 2))
    layers, log = counted(decoder, prompt, sampling)
    assert decoder.taken.keys() == {"device"}, decoder.taken
    counts = log.waits, log.uploads.total(), log.kernels.total(), 0, log.idle
    return Waits(layers, *(count / STEPS for count in counts))


def counted(decoder: Any, prompt: list[int], sampling: Any) -> tuple[float, Log]:
    """Return the draft forwards a step, and what happened, over some steps in the middle of a text."""
    steps = decoder.steps(prompt, 200, sampling, stop=None)
    list(islice(steps, 2))
    with logged() as log:
        taken = list(islice(steps, STEPS))
    return sum(step.draft_forwards for step in taken) / STEPS, log


def main() -> None:
    """Print all drafters, as markdown, each when it is known."""
    heads = ["drafter", "draft forwards", "waits", "uploads", "launches: draft", "verify", "captured: draft", "verify"]
    print(f"| {' | '.join(heads)} |\n{'|---' * len(heads)}|")
    for name in sys.argv[1:] or DRAFTERS:
        found, captured = (measure(pair_with(DRAFTERS[name], kind)) for kind in (False, True))
        numbers = [f"{number:.1f}" for number in found[:3]] + [
            f"{number:.0f}" for number in (*found[3:], *captured[3:])
        ]
        print(f"| {name} | {' | '.join(numbers)} |", flush=True)
    heads = ["on the device", "draft forwards", "waits", "idle", "uploads", "launches"]
    heads += ["captured: waits", "idle", "launches"]
    print(f"\n| {' | '.join(heads)} |\n{'|---' * len(heads)}|")
    for name in [name for name in sys.argv[1:] or DRAFTERS if name in ON_DEVICE]:
        found, captured = (measure_on_device(pair_with(DRAFTERS[name], kind)) for kind in (False, True))
        numbers = [found.layers, found.waits, found.idle, found.uploads, found.draft_launches]
        numbers = [f"{number:.1f}" for number in numbers[:4]] + [f"{numbers[4]:.0f}"]
        numbers += [f"{number:.1f}" for number in (captured.waits, captured.idle, captured.draft_launches)]
        print(f"| {name} | {' | '.join(numbers)} |", flush=True)


if __name__ == "__main__":
    main()
