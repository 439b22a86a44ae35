"""How often the host waits in a step, and what it launches, by drafter: the table of docs/devices.md.

    python tests/pretend/waits.py

On the pretended device, with the embedded models in float32, greedy, OPT-Tree of 60 nodes. A wait is a read by the host
or an upload that blocks; each costs a round trip, during which the device has nothing to do.
"""

import sys
import warnings
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1])]
import opt_tree  # noqa: E402
from pretend import plugin  # noqa: E402, F401
from pretend.device import Log, logged  # noqa: E402

DRAFTERS = {
    **{"lm": "lm:demo", "eagle": "eagle:demo", "eagle3": "eagle3:demo", "exit": "exit:demo"},
    **{"onepass": "onepass:demo", "store": "store:demo", "ngram": "ngram", "recycling": "recycling"},
    **{"ngram-recycling": "ngram-recycling", "copy": "copy:eagle:demo", "graft": "graft:1:eagle:demo+store:demo"},
    **{"product": "product:eagle:demo+store:demo", "rasd": "rasd:eagle:demo+store:demo"},
}
STEPS = 4


class Waits(NamedTuple):
    """Means over some steps."""

    layers: float
    waits: float
    uploads: float
    draft_launches: float
    verify_launches: float


def pair_with(spec: str) -> Any:
    """The embedded target on the device, with a drafter."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return opt_tree.load_pair("demo", drafter=spec, dtype="float32", draft_dtype="float32", device="cuda")


def measure(pair: Any, sampling: Any = None) -> Waits:
    """Count over steps in the middle of a text; the launches of a plain step are those of the verification."""
    sampling = sampling or opt_tree.Sampling()
    prompt = pair.encode("Tell me a short story about a fox and a lantern.")
    policy = opt_tree.OptTree(nodes=60, threshold=0.2)
    layers, log = counted(opt_tree.Decoder(pair.target, pair.drafter, policy), prompt, sampling)
    _, plain = counted(opt_tree.Decoder(pair.target, None, opt_tree.Static.empty()), prompt, sampling)
    launches, verify = log.kernels.total() / STEPS, plain.kernels.total() / STEPS
    return Waits(layers, log.waits / STEPS, log.uploads.total() / STEPS, max(launches - verify, 0), verify)


def counted(decoder: Any, prompt: list[int], sampling: Any) -> tuple[float, Log]:
    """Return the draft forwards a step, and what happened, over some steps in the middle of a text."""
    steps = decoder.steps(prompt, 200, sampling)
    list(islice(steps, 2))
    with logged() as log:
        taken = list(islice(steps, STEPS))
    return sum(step.draft_forwards for step in taken) / STEPS, log


def main() -> None:
    """Print all drafters, as markdown, each when it is known."""
    print("| drafter | draft forwards | waits | uploads | launches: draft | verify |\n|---|---|---|---|---|---|")
    for name, spec in DRAFTERS.items():
        found = measure(pair_with(spec))
        numbers = f"{found.layers:.1f} | {found.waits:.1f} | {found.uploads:.1f}"
        print(f"| {name} | {numbers} | {found.draft_launches:.0f} | {found.verify_launches:.0f} |", flush=True)


if __name__ == "__main__":
    main()
