"""Real decoding beside what was found along stored texts: the same tokens, in steps of the same lengths."""

from collections.abc import Sequence
from typing import Any

from experiments.real_pair.tables import Along
from experiments.real_pair.taken import Way
from opt_tree import CausalLM, CausalLMDrafter, Decoder
from opt_tree.tools.stop_strings import Stop
from opt_tree.tools.stored_text import StoredText

CHECKED = ("opt 8", "opt 60", "eagle2 25/5", "sequoia 60/6", "chain 6", "opt 60 at 0.5, fitted")


def decoded(
    models: tuple[CausalLM, CausalLMDrafter], texts: Sequence[tuple[StoredText, Along]], ways: dict[str, Way]
) -> dict[str, Any]:
    """Decode each text with each of the policies; return how many texts and how many steps agree, and which do not."""
    (target, drafter), found = models, {"texts": 0, "texts equal": 0, "steps": 0, "steps equal": 0}
    differ = []
    for text, along in texts:
        for name in CHECKED:
            if name in along.steps and name in ways:
                policy, temperature = ways[name]
                made = Decoder(target, drafter.calibrated(temperature), policy).generate(
                    text.prompt, text.limit, stop=Stop(text.ends)
                )
                lengths = [one.emitted for one in along.steps[name]]
                same = sum(one == other for one, other in zip(made.accept_lengths, lengths, strict=False))
                found["texts"] += 1
                found["texts equal"] += made.tokens == text.tokens
                found["steps"] += max(len(lengths), len(made.accept_lengths))
                found["steps equal"] += same
                if made.accept_lengths != lengths or made.tokens != text.tokens:
                    differ.append([along.set, along.id, name])
    return {**found, "differ": differ}
