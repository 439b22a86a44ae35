"""Another engine's greedy texts: which part from plain decoding in float32 here, where, and by rounding or a defect?

    python -m evaluation.audit --base-model-path demo --dtype bfloat16 --engine http://127.0.0.1:8000/v1
    python -m evaluation.audit --base-model-path smollm2 --dtype bfloat16 --answers peers.jsonl

An engine is asked for completions of the questions' token ids by OpenAI's protocol, and must tell its tokens
(`logprobs`). `--answers` takes an answer file of this project's commands, by whatever method, or what
`experiments.other_engines` writes. `--dtype` is what the engine computes in: its weights, computed in float32, write
the text that is compared with, and its noise is what a rounding tie may be. The verdict is that of `exactness`.
"""

import sys

from evaluation.command_line import Parser, run_command, work_of


def main(arguments: list[str] | None = None) -> int:
    """Return 0 if every difference is explained, 1 if one is a defect, 2 for bad input."""
    parser = Parser("python -m evaluation.audit", __doc__)
    parser.add_argument("--base-model-path", default="demo", help="the model that the engine runs")
    parser.add_argument("--dtype", default="bfloat16", help="what the engine computes in")
    parser.add_argument("--device", help="default: cuda where there is one, else cpu")
    parser.add_argument("--engine", metavar="URL", help="an OpenAI-compatible server, up to /v1")
    parser.add_argument("--served-name", help="what that server calls the model; default: the first that it lists")
    parser.add_argument("--fields", default="{}", metavar="JSON", help="more of each request of that server")
    parser.add_argument("--answers", metavar="FILE", help="texts that were written before, instead of a server")
    parser.add_argument("--bench-name", default="demo", help="question set that a server is asked")
    parser.add_argument("--question-file", help="JSONL or parquet file of questions, instead")
    parser.add_argument("--limit", type=int, default=20, help="this many questions at most")
    parser.add_argument("--max-new-tokens", type=int, default=64, help="of each answer of a server, at most")
    parser.add_argument("--json", action="store_true", help="print the figures as one JSON line, too")
    return run_command(lambda: work_of("evaluation.audit:run")(parser.parse_args(arguments)))


if __name__ == "__main__":
    sys.exit(main())

import argparse
import json
import re
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from evaluation.command_line import print_json
from evaluation.exactness import AnswerSet, Explainer, read_tokens, report, texts_of
from evaluation.questions.prompts import Prompter
from evaluation.questions.sets import load_set, select
from evaluation.run import models
from evaluation.run.options import Models
from opt_tree import CausalLM, Pair
from opt_tree.tools.presets import plain


@dataclass(frozen=True)
class Written:
    """One text of another engine."""

    key: int | str
    prompt: list[int]
    tokens: Sequence[int | str]
    """Ids, or what the engine shows of each token."""
    ended: bool = False
    """Whether the engine says that the answer was over, and may keep the end token for itself."""


class Auditor:
    """Plain decoding in float32 of a model with an engine's weights, and what tells a tie from a defect."""

    def __init__(self, pair: Pair) -> None:
        self.pair, self.explainer = pair, Explainer(pair.target)
        half = self.explainer.exact_dtype == torch.float32
        self._plain = plain(CausalLM(self.explainer.exact) if half else pair.target)
        self._ends = pair.stop.tokens or frozenset()

    def audit(self, name: str, texts: Sequence[Written]) -> dict[str, Any]:
        """Compare an engine's texts with those written here, and print what came of it; return the figures."""
        found = [self._pair_of(one) for one in tqdm(texts, desc="decoding plainly", disable=None)]
        theirs, ours = (
            texts_of(of, [(text.key, text.prompt, pair[side]) for text, pair in zip(texts, found, strict=True)])
            for side, of in enumerate((name, "here"))
        )
        print(f"{name} (a), and plain decoding in float32 here (b)")
        return report(theirs, ours, lambda: self.pair, self.explainer)

    def _pair_of(self, text: Written) -> tuple[list[int], list[int]]:
        """The ids of an engine's text, as far as it is judged, and those that are written here."""
        told = list(text.tokens)
        if text.ended and self._ends and not (told and self._ends & {*self._ids(told[-1])}):
            usual = self.pair.tokenizer.eos_token_id
            told.append(usual if usual in self._ends else min(self._ends))
        ours = self._plain.generate(text.prompt, len(told), stop=self.pair.stop).tokens if told else []
        theirs: list[int] = []
        for one in told:
            own = ours[len(theirs)] if len(theirs) < len(ours) else None
            ids = self._ids(one)
            if own in ids:
                theirs.append(own)
                continue
            if not ids:
                raise ValueError(f"the engine shows a token as {one!r}, which no token is here: ask it for ids")
            # Behind a parting nothing is judged. Of tokens that are shown alike, the likeliest one is meant.
            row = self.explainer.exact_row([*text.prompt, *theirs])
            theirs.append(max(ids, key=lambda token: float(row[token])))
            break
        return theirs, ours[: len(theirs)]

    def _ids(self, shown: int | str) -> Sequence[int]:
        """The tokens that an engine may mean."""
        if isinstance(shown, str) and (named := re.fullmatch(r"token_id:(\d+)", shown)):
            shown = int(named[1])  # vLLM's return_tokens_as_token_ids
        if isinstance(shown, int):
            return [shown] if 0 <= shown < self.pair.target.vocab else ()
        return self._by_text.get(shown, ())

    @cached_property
    def _by_text(self) -> dict[str, list[int]]:
        """All tokens by what is shown of each."""
        found: dict[str, list[int]] = {}
        for token in range(len(self.pair.tokenizer)):
            text = str(self.pair.tokenizer.decode([token], clean_up_tokenization_spaces=False))
            found.setdefault(text, []).append(token)
        return found


def from_file(path: str) -> dict[str, list[Written]]:
    """The texts of a file, by who wrote them: each peer of `experiments.other_engines`, or one answer file's method."""
    first, *_ = Path(path).read_text(encoding="utf-8").split("\n", 1)
    if '"peer"' not in first:
        answers = read_tokens(path)
        if float(answers.settings.get("temperature") or 0.0) > 0:
            raise ValueError(f"{path}: only greedy texts can be audited")
        return {answers.name: [*_turns(answers)]}
    found: dict[str, list[Written]] = {}
    for line in map(json.loads, Path(path).read_text(encoding="utf-8").splitlines()):
        if "prompt_ids" not in line:
            raise ValueError(f"{path}: an answer of {line['peer']} has no prompt_ids: ask the peers anew")
        key, of = f"{line.get('texts', '')} {line['prompt']}".strip(), found.setdefault(line["peer"], [])
        of.append(Written(key, line["prompt_ids"], line["tokens"], len(line["tokens"]) < line["limit"]))
    return found


def _turns(answers: AnswerSet) -> Iterator[Written]:
    for record in answers.answers:
        for choice in record["choices"]:
            for turn, text in enumerate(zip(choice["prompt_ids"], choice["token_ids"], strict=True)):
                yield Written(f"{record['question_id']}/{choice.get('index', 0)}/{turn}", *text)


def from_engine(given: argparse.Namespace, pair: Pair) -> dict[str, list[Written]]:
    """Ask a server for completions of the questions' prompts."""
    questions = select(load_set(given.bench_name, given.question_file).questions, None, None, given.limit)
    prompter = Prompter(pair.tokenizer, pair.stop)
    url = given.engine.rstrip("/")
    name = given.served_name or _sent(f"{url}/models")["data"][0]["id"]
    common = {"model": name, "max_tokens": given.max_new_tokens, "temperature": 0, "logprobs": 1}
    found = []
    for question in tqdm(questions, desc="asking", disable=None):
        prompt = prompter.encode([question.turns[0]], [])
        choice = _sent(f"{url}/completions", {**common, "prompt": prompt, **json.loads(given.fields)})["choices"][0]
        if not choice.get("logprobs"):
            raise ValueError(f"{url} tells no tokens (logprobs): its texts cannot be audited")
        ended = choice["finish_reason"] == "stop"
        found.append(Written(question.id, prompt, choice["logprobs"]["tokens"], ended))
    return {f"{name} at {url}": found}


def _sent(url: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    """What a server answers. Raises ValueError, in one line, where it refuses or is not there."""
    data = None if body is None else json.dumps(body).encode()
    try:
        request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=600) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        raise ValueError(f"{url}: status {error.code}, {error.read(300).decode(errors='replace')}") from error
    except (OSError, ValueError) as error:
        raise ValueError(f"{url}: {error}") from error


def run(given: argparse.Namespace) -> int:
    """Audit and print."""
    if (given.engine is None) == (given.answers is None):
        raise ValueError("name --engine URL or --answers FILE, one of them")
    device = given.device or ("cuda" if torch.cuda.is_available() else "cpu")
    written = from_file(given.answers) if given.answers else {}
    options = Models(base_model_path=given.base_model_path, dtype=given.dtype, device=device, no_exact=True)
    auditor = Auditor(models.load_target(options, device))
    written = written or from_engine(given, auditor.pair)
    figures = {name: auditor.audit(name, texts) for name, texts in written.items()}
    print_json(given.json, figures)
    return int(any(one["verdicts"].get("defect") for one in figures.values()))
