"""Temperature 1, by real decoding: what trees emit where the target draws its tokens.

The verifier is the default: the target draws with a seed at every place, and the path that has what it drew is kept. So
a text has the same tokens whatever the tree, and every policy is measured along the same texts.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from tqdm import tqdm

from evaluation.answers.metrics import Estimate, estimate
from experiments.real_pair.tables import rounded
from opt_tree import CausalLM, CausalLMDrafter, Decoder, OptTree, Sampling, Static, TreePolicy
from opt_tree.tools.stop_strings import Stop
from opt_tree.tools.stored_text import StoredText

WAYS: dict[str, tuple[TreePolicy, str, int, int]] = {
    "chain 6": (Static.chain(6), "chain", 6, 6),
    "opt 8": (OptTree(8, 0), "OPT-Tree", 8, 10),
    "chain 10": (Static.chain(10), "chain", 10, 10),
    "opt 25": (OptTree(25, 0), "OPT-Tree", 25, 10),
    "opt 60": (OptTree(60, 0), "OPT-Tree", 60, 10),
}
"""Each policy with its tree's name, nodes and layers at most."""


def decoded(
    models: tuple[CausalLM, CausalLMDrafter], texts: Sequence[tuple[str, str, StoredText]], limit: int
) -> Iterator[dict[str, Any]]:
    """Decode each text with every policy, by the text's place as the seed: a line a text."""
    target, drafter = models
    decoders = {name: Decoder(target, drafter, policy) for name, (policy, *_) in WAYS.items()}
    for seed, (kind, named, text) in enumerate(tqdm(texts, "temperature 1", unit="text", disable=None)):
        line: dict[str, Any] = {"set": kind, "id": named, "steps": {}, "tokens": {}}
        for name, decoder in decoders.items():
            made = decoder.generate(text.prompt, limit, Sampling(1.0), Stop(text.ends), seed=seed)
            line["tokens"][name] = made.tokens
            steps = zip(made.accept_lengths, made.steps, strict=True)
            line["steps"][name] = [[length, one.draft_forwards, one.expected_accepted] for length, one in steps]
        yield line


def sampled_table(lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Tokens a step, of all texts and of each set, and how far OPT-Tree is ahead of the chain of ten."""
    sets = list(dict.fromkeys(line["set"] for line in lines))
    rows = []
    for name, (_, tree, nodes, layers) in WAYS.items():
        by_set = [round(_rate([line for line in lines if line["set"] == one], name)[0], 2) for one in sets]
        ahead = None if name == "chain 10" else rounded(_ahead(lines, name, "chain 10"))
        steps = [step for line in lines for step in line["steps"][name]]
        equal = sum(line["tokens"][name] == line["tokens"]["chain 6"] for line in lines)
        work = round(sum(step[1] for step in steps) / len(steps), 2)
        promised = round(sum(step[2] for step in steps) / len(steps), 2)
        first = [tree, nodes, layers, len(lines), *rounded(_rate(lines, name)), *by_set]
        rows.append([*first, *(ahead or [None, None]), work, promised, f"{equal} of {len(lines)}"])
    columns = ["tree", "nodes", "layers at most", "texts", "tokens a step", "95 % interval", *sets]
    columns += ["less the chain of ten", "its 95 % interval", "draft forwards a step", "E(A)"]
    return {"title": "Temperature 1", "columns": [*columns, "same text as the chain of six"], "rows": rows}


def _sums(line: dict[str, Any], name: str) -> list[int]:
    return [sum(step[0] for step in line["steps"][name]), len(line["steps"][name])]


def _rate(lines: Sequence[dict[str, Any]], name: str) -> Estimate:
    return estimate([_sums(line, name) for line in lines], lambda sums: sums[..., 0] / sums[..., 1])


def _ahead(lines: Sequence[dict[str, Any]], name: str, than: str) -> Estimate:
    both = [[*_sums(line, name), *_sums(line, than)] for line in lines]
    return estimate(both, lambda sums: sums[..., 0] / sums[..., 1] - sums[..., 2] / sums[..., 3])
