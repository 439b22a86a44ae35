"""Everything the model card and the README say about a pair, measured in one run on held-out prompts.

python -m evaluation.card                  # the embedded models, all parts
python -m evaluation.card --parts rules,overhead --prompts 10
"""

import argparse
import json
import platform
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
import transformers
from tqdm import tqdm
from transformers import PreTrainedModel

from evaluation.compare.published import PublishedRule
from evaluation.exactness.divergence import Divergence, classify
from evaluation.run.baselines import Timed, assistant_of, transformers_assisted, transformers_greedy
from opt_tree import Decoder, Generation, OptTree, Pair, Static, TreePolicy, load_pair, load_tokenizer
from opt_tree.checkpoints import DEMO, encode
from opt_tree.inflate import describe, inflate_pair
from opt_tree.training.data import DEFAULT_DATA, heldout_prompts

Row = dict[str, float | int | str]


def repeated_ngrams(tokens: list[int], n: int = 8) -> float:
    """The share of an answer's n-grams that occurred before in it: 0 without a loop."""
    grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


class Subjects:
    """The pairs under test, loaded when first asked for, and the prompts they decode."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self._pairs: dict[tuple, Pair] = {}
        self._inflated: dict[torch.dtype, PreTrainedModel] = {}
        # Not a pair's: which targets are worth their memory, and in which dtype, is for the parts to say.
        tokenizer = load_tokenizer(
            str(DEMO / "target") if options.base_model_path == "demo" else options.base_model_path
        )
        texts = heldout_prompts(tokenizer, Path(options.data), options.prompts)
        self.prompts = [encode(tokenizer, [{"role": "user", "content": text}]) for text in texts]

    def pair(self, drafter: str, dtype: str = "auto", bare: bool = False) -> Pair:
        """The target with its "draft" or "eagle" drafter."""
        o = self.options
        names = {"drafter": o.draft_model_path} if drafter == "draft" else {"eagle": o.ea_model_path}
        key = (drafter, dtype, bare)
        if key not in self._pairs:
            pair = load_pair(o.base_model_path, **names, dtype=dtype, device=o.device, bare=bare)
            if o.inflate:
                # The pairs share the large target: there is room for one.
                pair = inflate_pair(pair, o.inflate, large=self._inflated.get(pair.target.dtype))
                self._inflated[pair.target.dtype] = pair.target.model
            self._pairs[key] = pair
        return self._pairs[key]

    def inflations(self) -> list[str]:
        """What was said of each inflated target so far, and of the head if one drafts for it."""
        # The pair that has a head comes last and says more of the same model.
        pairs = sorted(self._pairs.values(), key=lambda pair: pair.drafter.features)
        said = {id(pair.target.model): describe(pair.target.model, pair.drafter) for pair in pairs}
        return [line for line in said.values() if line]

    def decode(self, pair: Pair, policy: TreePolicy, title: str) -> list[Generation]:
        """Greedy answers to all prompts."""
        decoder = Decoder(pair.target, pair.drafter, policy)
        length = self.options.max_new_tokens
        return [
            decoder.generate(p, length, stop=pair.stop)
            for p in tqdm(self.prompts, desc=title, unit="prompt", leave=False)
        ]


def exactness(subjects: Subjects) -> list[Row]:
    """Whether OPT-Tree's answers are plain decoding's and transformers', token for token; differences explained."""
    rows: list[Row] = []
    for dtype in ("float32", "bfloat16"):
        pair = subjects.pair("draft", dtype)
        plain = [g.tokens for g in subjects.decode(pair, Static.empty(), f"{dtype} plain")]
        answers = {
            name: [g.tokens for g in subjects.decode(subjects.pair(name, dtype), OptTree(60, 0.2), f"{dtype} {name}")]
            for name in ("draft", "eagle")
        }
        length = subjects.options.max_new_tokens
        answers["transformers"] = [
            transformers_greedy(pair, p, length).tokens for p in tqdm(subjects.prompts, leave=False)
        ]
        for name, tokens in answers.items():
            different = [i for i in range(len(plain)) if plain[i] != tokens[i]]
            rows.append(
                {"dtype": dtype, "against plain": name, "prompts": len(plain), "equal": len(plain) - len(different)}
            )
            for i in different:
                found = classify(pair.target, subjects.prompts[i], plain[i], tokens[i])
                rows.append({"dtype": dtype, "against plain": f"  {name}: prompt {i}", "verdict": _verdict(found)})
    return rows


def _verdict(found: Divergence | None) -> str:
    return "equal" if found is None else f"{found.verdict} at token {found.position + 1}: {found.reason}"


def rules(subjects: Subjects) -> list[Row]:
    """The paper's rule against the published code's, and the sharpened law against the bare one."""
    rows: list[Row] = []
    for drafter in ("draft", "eagle"):
        for policy, bare in (
            (PublishedRule(60, 0.5, 10), True),
            (OptTree(60, 0.5, 10), True),
            (OptTree(60, 0.2, 10), True),
            (OptTree(60, 0.5, 10), False),
            (OptTree(60, 0.2, 10), False),
            (Static.kary(2, 4), True),
            (Static.chain(4), True),
        ):
            pair = subjects.pair(drafter, bare=bare)
            name = (
                f"{type(policy).__name__} {'' if isinstance(policy, Static) else policy.threshold} {policy.max_depth}"
            )
            generations = subjects.decode(pair, policy, f"{drafter} {name}")
            steps = [step for g in generations for step in g.steps]
            emitted = sum(len(g.tokens) for g in generations)
            rows.append(
                {
                    "drafter": drafter,
                    "rule": f"{name}{'' if bare else ' sharpened'}",
                    "tokens/step": emitted / len(steps),
                    "E(A)+1": 1 + float(np.mean([s.expected_accepted for s in steps])),
                    "draft forwards": float(np.mean([s.draft_forwards for s in steps])),
                    "draft tokens": float(np.mean([s.draft_tokens for s in steps])),
                    "nodes": float(np.mean([s.tree.nodes for s in steps])),
                    "repeated 8-grams %": 100 * float(np.mean([repeated_ngrams(g.tokens) for g in generations])),
                    "answers ended": sum(g.finish_reason == "stop_token" for g in generations),
                }
            )
    return rows


def overhead(subjects: Subjects) -> list[Row]:
    """Where a step's time goes outside the two models' forwards; budgets interleaved prompt by prompt."""
    rows: list[Row] = []
    for drafter in ("draft", "eagle"):
        pair = subjects.pair(drafter)
        policies = [OptTree(nodes, subjects.options.threshold) for nodes in (8, 16, 24, 60)]
        steps: dict[int, list] = {policy.nodes: [] for policy in policies}
        for prompt in tqdm(subjects.prompts, desc=f"{drafter} overhead", leave=False):
            for policy in policies:
                decoder = Decoder(pair.target, pair.drafter, policy)
                # The first steps of a generation pay for cold memory.
                steps[policy.nodes] += decoder.generate(prompt, 64, stop=pair.stop).steps[2:]
        for nodes, taken in steps.items():
            times = [step.times for step in taken]
            rows.append(
                {
                    "drafter": drafter,
                    "nodes": nodes,
                    "step ms": 1e3 * float(np.median([t.total for t in times])),
                    "draft forwards ms": 1e3 * float(np.median([t.draft_forward for t in times])),
                    "target forward ms": 1e3 * float(np.median([t.target_forward for t in times])),
                    "growing the tree ms": 1e3 * float(np.median([t.draft - t.draft_forward for t in times])),
                    "other ms": 1e3 * float(np.median([t.other for t in times])),
                    "other %": 100 * float(np.median([t.other / t.total for t in times])),
                }
            )
    return rows


def speed(subjects: Subjects) -> list[Row]:
    """Tokens a second over budgets and thresholds, prefill included, beside plain decoding, transformers' greedy and
    assisted generation (by the draft model, for a head's rows, too), interleaved prompt by prompt."""
    rows: list[Row] = []
    options, length = subjects.options, subjects.options.max_new_tokens
    assisted = partial(transformers_assisted, assistant=assistant_of(subjects.pair("draft", options.dtype).drafter))
    for drafter in options.drafters.split(","):
        pair = subjects.pair(drafter, options.dtype)
        policies: list[OptTree | Static] = [Static.empty(), Static.chain(3)]
        policies += [OptTree(n, t) for n in map(int, options.nodes.split(",")) for t in options.thresholds]
        methods: dict[str, Callable[[list[int]], tuple[int, float, int]]] = {
            _title(policy): partial(_decode_timed, Decoder(pair.target, pair.drafter, policy), pair, length)
            for policy in policies
        }
        methods["transformers greedy"] = partial(_timed, transformers_greedy, pair, length)
        methods["transformers assisted"] = partial(_timed, assisted, pair, length)
        spent = {name: np.zeros(3) for name in methods}
        for run in methods.values():
            run(subjects.prompts[0])  # warm up
        for prompt in tqdm(subjects.prompts, desc=f"{drafter} speed", leave=False):
            for name, run in methods.items():
                tokens, seconds, steps = run(prompt)
                spent[name] += tokens, seconds, steps
        rate = {name: tokens / seconds for name, (tokens, seconds, _) in spent.items()}
        baselines = ("plain", "transformers greedy", "transformers assisted")
        for name in sorted(rate, key=lambda name: -rate[name]):
            tokens, _, steps = spent[name]
            row: Row = {"drafter": drafter, "method": name, "tokens/s": rate[name]}
            row |= {f"x {baseline}": rate[name] / rate[baseline] for baseline in baselines}
            rows.append(row | {"tokens/step": tokens / steps if steps else ""})
    return rows


def _title(policy: OptTree | Static) -> str:
    if isinstance(policy, OptTree):
        return f"OPT-Tree {policy.nodes}/{policy.threshold}/{policy.max_depth}"
    return "plain" if not policy.nodes else f"chain of {policy.nodes}"


def _decode_timed(decoder: Decoder, pair: Pair, length: int, prompt: list[int]) -> tuple[int, float, int]:
    generation = decoder.generate(prompt, length, stop=pair.stop)
    return len(generation.tokens), generation.seconds, len(generation.steps)


def _timed(generate: Callable[..., Timed], pair: Pair, length: int, prompt: list[int]) -> tuple[int, float, int]:
    timed = generate(pair, prompt, length)
    return len(timed.tokens), timed.seconds, 0


PARTS: dict[str, Callable[[Subjects], list[Row]]] = {
    "exactness": exactness,
    "rules": rules,
    "overhead": overhead,
    "speed": speed,
}


def table(rows: list[Row]) -> str:
    """Rows of one shape or several as aligned columns."""
    keys = list(dict.fromkeys(key for row in rows for key in row))
    cells = [[_cell(row.get(key, "")) for key in keys] for row in rows]
    widths = [max(len(key), *(len(row[i]) for row in cells)) for i, key in enumerate(keys)]
    lines = ["  ".join(key.ljust(width) for key, width in zip(keys, widths, strict=True))]
    lines += ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in cells]
    return "\n".join(line.rstrip() for line in lines)


def _cell(value: float | int | str) -> str:
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def _numbers(text: str) -> list[float]:
    return [float(number) for number in text.split(",")]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--base-model-path", default="demo")
    parser.add_argument("--draft-model-path", default="demo")
    parser.add_argument("--ea-model-path", default="demo")
    parser.add_argument("--data", default=DEFAULT_DATA, help="corpus folder for the held-out prompts")
    parser.add_argument("--prompts", type=int, default=40)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--threshold", type=float, default=0.2, help="for the part overhead")
    parser.add_argument("--drafters", default="draft,eagle", help="for the part speed")
    parser.add_argument("--nodes", default="4,8,12,16,24,40", help="budgets of the part speed")
    parser.add_argument(
        "--thresholds", type=_numbers, default=[0.1, 0.2, 0.3, 0.45], help="of the part speed (0.1,0.2,0.3,0.45)"
    )
    parser.add_argument("--dtype", default="auto", help="of the target in the part speed")
    parser.add_argument("--inflate", help="blow the target up, as for evaluation.eval_opt_classic")
    parser.add_argument("--parts", default=",".join(PARTS), help="of " + ", ".join(PARTS))
    parser.add_argument("--device")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    parser.add_argument("--output", help="append one JSON line a part")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    unknown = sorted(set(options.parts.split(",")) - set(PARTS))
    if unknown:
        sys.exit(f"error: unknown parts {', '.join(unknown)}; there are {', '.join(PARTS)}")
    try:
        subjects = Subjects(options)
        versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
        machine = f"{versions}, {platform.machine()}, {options.threads} thread(s)"
        print(f"{len(subjects.prompts)} held-out prompts, greedy, {options.max_new_tokens} new tokens; {machine}")
        for name in options.parts.split(","):
            rows = PARTS[name](subjects)
            about = [f"{name}: {' '.join((PARTS[name].__doc__ or '').split())}", *subjects.inflations()]
            print("", *about, table(rows), sep="\n", flush=True)
            line = json.dumps({"part": name, "machine": machine, "inflated": subjects.inflations(), "rows": rows})
            if options.output:
                with open(options.output, "a") as file:
                    file.write(line + "\n")
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
