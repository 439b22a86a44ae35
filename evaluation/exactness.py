"""Why do two answer files differ? For every answer, the first token at which they part, and a verdict.

Run as `python -m evaluation.exactness a.jsonl b.jsonl`. A verdict is a rounding tie (with the gap and the noise),
different settings (which), or a defect; `divergence` tells ties from defects. Turns whose prompts differ
because the answer before them did are counted, not judged.
"""

import sys

from evaluation.command_line import Parser, run_command, work_of


def main(arguments: list[str] | None = None) -> int:
    """Return 0 if every difference is explained, 1 if one is a defect, 2 for bad input."""
    parser = Parser("python -m evaluation.exactness", __doc__)
    parser.add_argument("a", help="answer file")
    parser.add_argument("b", help="answer file to compare it with")
    parser.add_argument("--base-model-path", help="target; default: the one that the headers name")
    parser.add_argument("--dtype", help="of the target; default: the coarser one of the two headers")
    parser.add_argument("--device", help="default: cuda where there is one, else cpu")
    parser.add_argument("--json", action="store_true", help="print the figures as one JSON line, too")
    return run_command(lambda: work_of("evaluation.exactness:run")(parser.parse_args(arguments)))


if __name__ == "__main__":
    sys.exit(main())

import argparse
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from evaluation.answers.reading import ASKED, ROUNDING, AnswerSet, settings_apart
from evaluation.answers.record import TurnOfBoth, seed_of, turns_of_both
from evaluation.command_line import Value, print_json, table
from evaluation.divergence import Divergence, Explainer, token_at
from evaluation.run import models
from evaluation.run.options import Models
from opt_tree import Pair, Sampling
from opt_tree.errors import counted
from opt_tree.target import shared


def read_tokens(path: str) -> AnswerSet:
    """Read an answer file. Raises ValueError unless its answers are there as token ids."""
    why = "only answer files of this project's commands can be judged, text does not tell which tokens made it"
    return AnswerSet.read(path).require(("prompt_ids", "token_ids"), why)


def texts_of(name: str, texts: Iterable[tuple[int | str, list[int], list[int]]]) -> AnswerSet:
    """Texts that no answer file holds, as one that can be judged: of each its key, its prompt and its tokens."""
    answers = [
        {"question_id": key, "choices": [{"index": 0, "turns": [""], "prompt_ids": [prompt], "token_ids": [tokens]}]}
        for key, prompt, tokens in texts
    ]
    return AnswerSet(Path(name), answers, failed=[], header=None)


def judge(explainer: Explainer, a: AnswerSet, b: AnswerSet, difference: TurnOfBoth) -> Divergence:
    """Give one difference its verdict: by the prompts, then the settings, then the logits."""
    position = shared(*difference.answers)
    pair = (token_at(difference.answers[0], position), token_at(difference.answers[1], position))
    temperature = max(float(run.settings.get("temperature") or 0.0) for run in (a, b))
    asked = settings_apart(a, b, ASKED if temperature == 0 else (*ASKED, "seed"))
    if temperature > 0 and "transformers" in (a.settings.get("method"), b.settings.get("method")):
        asked.append("transformers draws with random numbers of its own")
    if asked:
        return Divergence(position, pair, "different settings", "; ".join(asked))
    if difference.prompts[0] != difference.prompts[1]:
        if difference.follows:
            return Divergence(position, pair, "different prompt", "an earlier turn of the conversation differs")
        return Divergence(position, pair, "defect", "the prompts differ, the settings do not")
    if None in pair:
        apart = settings_apart(a, b, ("max_new_token",))
        ended = "a" if pair[0] is None else "b"
        why = "; ".join(apart) or f"{ended} ended after {counted(position, 'token')} with no setting that says so"
        return Divergence(position, pair, "different settings" if apart else "defect", why)
    apart = settings_apart(a, b, ROUNDING)
    if any(run.settings.get("weights") for run in (a, b)):  # no logits tell: those of full weights are others
        defect = not apart and _both_canonical(a, b)
        why = "; ".join(apart) or f"the same quantised target, {'' if defect else 'not '}canonical in both runs"
        return Divergence(position, pair, "defect" if defect else "different settings", why)
    seed = seed_of(a.settings.get("seed", 0), difference.question, difference.choice, difference.turn)
    sampling = Sampling(temperature if temperature > 1e-5 else 0.0)
    found = explainer.explain(difference.prompts[0], *difference.answers, sampling, seed)
    assert found is not None
    if found.verdict == "rounding tie" and not apart and _both_canonical(a, b):
        return replace(found, verdict="defect", reason="both runs are canonical, where nothing rounds otherwise")
    if found.verdict == "defect" and apart:
        return replace(found, verdict="different settings", reason=f"{'; '.join(apart)}; {found.reason}")
    return found


def _both_canonical(a: AnswerSet, b: AnswerSet) -> bool:
    """Whether this project's loop decoded both in canonical arithmetic, by the same engine."""
    ours = all(run.settings.get("canonical") and run.settings.get("method") != "transformers" for run in (a, b))
    return ours and not settings_apart(a, b, ("engine",))


def load_target(a: AnswerSet, b: AnswerSet, arguments: argparse.Namespace) -> Pair:
    """Load the target that the headers name, in the coarser of their dtypes."""
    path = arguments.base_model_path or a.settings.get("base_model_path") or b.settings.get("base_model_path")
    if path is None:
        raise ValueError(f"neither {a.path} nor {b.path} has a header that names the target: pass --base-model-path")
    dtypes = [run.settings["target_dtype"] for run in (a, b) if "target_dtype" in run.settings]
    dtype = arguments.dtype or max(dtypes, key=lambda name: torch.finfo(getattr(torch, name)).eps, default="auto")
    through = a.settings.get("through") or b.settings.get("through")
    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    options = Models(base_model_path=path, dtype=dtype, device=device, through=through, no_exact=True)
    return models.load_target(options, device)


def run(arguments: argparse.Namespace) -> int:
    """Judge two answer files and print the result."""
    a, b = read_tokens(arguments.a), read_tokens(arguments.b)
    figures = report(a, b, lambda: load_target(a, b, arguments))
    print_json(arguments.json, figures)
    return 1 if figures["verdicts"].get("defect") else 0


def report(a: AnswerSet, b: AnswerSet, load: Callable[[], Pair], explainer: Explainer | None = None) -> dict[str, Any]:
    """Print what differs between two sets, and why; return the figures. The target is loaded where something does."""
    turns = list(turns_of_both(a.answers, b.answers))
    count, found = len(turns), [turn for turn in turns if turn.differs]
    if not turns:
        raise ValueError(f"{a.path} and {b.path} have no question in common")
    judged: list[tuple[TurnOfBoth, Divergence]] = []
    if found:
        pair = load()
        explainer = explainer or Explainer(pair.target)
        judged = [(one, judge(explainer, a, b, one)) for one in tqdm(found, desc="judging", disable=None)]
        print(models.made_of(pair) or f"target {pair.target.name}", f"in {_plain(pair.target.dtype)},", end=" ")
        print(f"exact logits in {_plain(explainer.exact_dtype)}")
        print(table([_row(where, why, pair) for where, why in judged], ".4g"))
    verdicts = Counter(divergence.verdict for _, divergence in judged)
    compared = count - verdicts["different prompt"]
    equal = count - len(judged)
    same = f"{equal} of {counted(compared, 'turn')} with the same prompt are equal token for token"
    told = [f"{number} {verdict}" for verdict, number in verdicts.most_common()]
    print("; ".join([f"{same} ({equal / max(compared, 1):.1%})", *told]))
    listed = [{"question_id": d.question, "choice": d.choice, "turn": d.turn, **asdict(v)} for d, v in judged]
    return {"turns": count, "equal": equal, "verdicts": dict(verdicts), "divergences": listed}


def _row(where: TurnOfBoth, why: Divergence, pair: Pair) -> dict[str, Value]:
    one, other = ("(ended)" if token is None else repr(pair.tokenizer.decode([token])) for token in why.tokens)
    verdict = f"{why.verdict}, seen both ways" if why.verdict == "rounding tie" and why.reproduced else why.verdict
    if why.gap is None or why.verdict not in ("rounding tie", "different prompt"):
        verdict += f": {why.reason}"
    place = {
        "question": f"{where.question}/{where.choice}" if where.choice else f"{where.question}",
        "turn": str(where.turn + 1),
        "token": str(why.position),
    }
    numbers = (*(why.scores or (None, None)), why.gap, why.noise)
    measured: dict[str, Value] = dict(zip(("logit a", "logit b", "gap", "noise"), numbers, strict=True))
    return place | {"a": one, "b": other} | measured | {"verdict": verdict}


def _plain(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
