"""The methods of a run: each with its settings, its answer file, and what has no answer yet.

Owns what makes two answers answers of one kind, and in which order the methods take their turns.
"""

import hashlib
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from tqdm import tqdm

from evaluation.answers.file import AnswerFile
from evaluation.command_line import counted, machine_of
from evaluation.questions.prompts import Prompter
from evaluation.questions.sets import Question, QuestionSet
from evaluation.run.conversation import Conversation, alone, side_by_side
from evaluation.run.models import made_of, make_method, resolved
from evaluation.run.options import Options
from evaluation.run.processes import Processes
from evaluation.timing import Method, contested, environment, schedule
from opt_tree import Pair
from opt_tree.methods.own_files import digests
from opt_tree.models.capabilities import size_of
from opt_tree.system.files import check_writable
from opt_tree.system.memory import out_of_memory

PLACE = {
    *("bench_name", "question_file", "data_dir", "fetch", "question_begin", "question_end", "limit"),
    *("answer_file", "overwrite", "baseline", "json"),
    *("device", "threads", "dtype", "weights", "compile", "unpacked", "canonical", "no_exact"),
    *("num_gpus_per_model", "num_gpus_total", "max_gpu_memory"),
}
"""Options that say where, or which part, or are settings under another name: they change no answer themselves."""
DRAFTING = {"nodes", "threshold", "max_depth", "controller", "draft_dtype", "sharpening", "drafter"}
"""Settings that plain decoding has no use for."""
_WARM_UP = "Count from one to ten."
Found = list[dict[str, Any]] | Exception
"""The choices that answer a question, or why there are none."""


@dataclass(frozen=True)
class Work:
    """One method's part of a run: its name, its settings, its answer file, and the decoder once it is loaded."""

    name: str
    settings: dict[str, Any]
    whole: AnswerFile
    """What is asked for."""
    file: AnswerFile
    """What this process writes: that file, or its own part of it."""
    overwrite: bool = False
    method: Method | None = None

    def loaded(self, options: Options, pair: Pair, prompter: Prompter) -> "Work":
        """The same with its decoder, and the settings that are known once the models are there."""
        drafts = self.name in ("opt", "chain")
        known = {key: value for key, value in resolved(pair).items() if drafts or key not in DRAFTING}
        method = make_method(self.name, options, pair, prompter)
        return replace(self, settings=self.settings | known, method=method)

    def done(self, all_parts: bool = False) -> set[int | str]:
        """The questions that have an answer and are not to be answered again."""
        return {record["question_id"] for record in self.whole.read()} if all_parts or not self.overwrite else set()

    def replaced(self, processes: Processes) -> list[AnswerFile]:
        """What --overwrite removes with the first answer: all that is there but what other processes answer now."""
        if not self.overwrite:
            return []
        others = [self.whole.part(rank).path for rank in range(processes.size) if rank != processes.rank]
        return [self.whole, self.file, *(part for part in self.whole.parts() if part.path not in others)]

    def write(self, question: Question, found: Found) -> None:
        """Append an answer, or note why there is none."""
        about = {"question_id": question.id, "answer_id": self.answer_id(question.id)}
        about |= {"model_id": self.settings["model_id"], "category": question.category}
        if not isinstance(found, Exception):
            self.file.append(about | {"choices": found, "tstamp": time.time()})
            return
        why = f"{type(found).__name__}: {out_of_memory(found) or ' '.join(str(found).split()) or 'no message'}"
        self.file.append_failed(about | {"failed": why, "tstamp": time.time()})
        tqdm.write(f"failed: {self.name}, question {question.id}: {why}", sys.stderr)

    def answer_id(self, question: int | str) -> str:
        """The same for the same question and settings, and of the length of FastChat's ids."""
        digest = hashlib.sha256(f"{json.dumps(self.settings, sort_keys=True)}/{question}".encode()).hexdigest()
        return digest[:22]


def plan(options: Options, questions: QuestionSet, processes: Processes = Processes()) -> list[Work]:
    """The method asked for and, with --baseline, plain decoding and transformers' generate beside it."""
    default = f"{questions.name}-{options.command}-{options.method}.jsonl"
    path = Path(default if options.answer_file is None else options.answer_file).expanduser()
    model = options.model_id or Path(options.base_model_path.rstrip("/")).name
    settings = {key: value for key, value in options.as_dict().items() if key not in PLACE}
    settings |= {
        "model_id": f"{model}-temperature-{options.temperature}",
        "device": str(options.device).partition(":")[0],
        "questions_sha256": questions.sha256,
    }
    bare = {key: value for key, value in settings.items() if key not in DRAFTING}
    if code := digests((options.drafter, options.controller or "", options.through or "")):
        settings["code"] = code

    def work(name: str, path: Path, settings: dict[str, Any]) -> Work:
        whole = AnswerFile(path)
        own = whole if processes.size == 1 else whole.part(processes.rank)
        return Work(name, settings, whole, own, options.overwrite)

    works = [work(options.method, path, bare if options.method == "none" else settings)]
    baselines = ("transformers",) if options.method == "none" else ("plain", "transformers")
    stem = path.name.removesuffix(".jsonl")
    for name in baselines if options.baseline else ():
        beside, named = path.with_name(f"{stem}.{name}.jsonl"), f"{settings['model_id']}-{name}"
        works.append(work(name, beside, bare | {"model_id": named, "method": name}))
    return works


@contextmanager
def held(works: Sequence[Work]) -> Iterator[None]:
    """Be the one writer of each work's file. ValueError where there is one, or where the file is of other settings."""
    with ExitStack() as locks:
        for work in works:
            check_writable(work.file.path)
            locks.enter_context(work.file.lock())
            for part in work.whole.parts() if work.file is work.whole else ():
                with part.lock():  # of a run of several processes that may still be there
                    pass
            if not work.overwrite:
                work.whole.check_settings(work.settings)
        yield


def begin(works: Sequence[Work], options: Options, pair: Pair, questions: QuestionSet, processes: Processes) -> None:
    """Begin a session of every file, now that the models are there, and say what runs where."""
    session = {
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "options": options.as_dict(),
        "questions": str(questions.path),
        "target": made_of(pair) or f"{pair.target.name}, {size_of(pair.target.model)}",
        "processes": processes.size,
        "environment": environment(pair.target.device),
    }
    for work in works:
        if not work.overwrite:
            work.whole.check_settings(work.settings)
        for difference in work.file.begin(work.settings, session, work.replaced(processes)):
            print(f"note: {work.file.path} goes on elsewhere ({difference}): times are not comparable", file=sys.stderr)
    where = f"{works[0].settings['target_dtype']}; {machine_of(session['environment'])}"
    print(f"{session['target']}, {where}, process {processes.rank + 1} of {processes.size}", file=sys.stderr)
    print(f"questions: {questions.name}, {questions.path}", file=sys.stderr)


def answers(
    works: Sequence[Work], questions: Sequence[Question], conversation: Conversation, width: int
) -> Iterator[tuple[Work, Question, Found]]:
    """Yield what has no answer yet with its answer, or with why it has none: then the next question is begun.

    The works take turns, question by question. With a `width` above 1 so many questions go side by side, of one work
    after the other.
    """
    done: Mapping[str, set[int | str]] = {work.name: work.done() for work in works}
    todo = [question for question in questions if any(question.id not in done[work.name] for work in works)]
    for work in works if todo else ():  # untimed: first calls pay for what later ones find ready
        assert work.method is not None
        work.method(conversation.prompter.encode([_WARM_UP], []), min(16, conversation.max_new_tokens), 0)
    bar = partial(tqdm, total=len(questions), desc="questions")
    if width == 1:
        for work, question in schedule(works, bar(todo, initial=len(questions) - len(todo))):
            if question.id not in done[work.name]:
                yield work, question, alone(work.method, conversation.attempt(question, work.method))
        return
    for work in works:
        own = [question for question in todo if question.id not in done[work.name]]
        ended = side_by_side(work.method, [partial(conversation.attempt, question) for question in own], width)
        for place, found in bar(ended, initial=len(questions) - len(own)):
            yield work, own[place], found


def sum_up(works: Sequence[Work], share: Sequence[Question]) -> int:
    """Say how many answers there are and which questions of the share have none; return 1 where one has none."""
    status = 0
    for work in works:
        done = work.done(all_parts=True)
        print(f"{counted(len(done), 'answer')} in {work.file.path}", file=sys.stderr)
        if lacking := [str(question.id) for question in share if question.id not in done]:
            status = 1
            told = f"{len(lacking)} failed ({work.file.failed_path}): {', '.join(lacking)}"
            print(f"{told}; the same command tries them again", file=sys.stderr)
        if work.file is not work.whole:
            print(f"python -m evaluation.report {work.whole.path} makes one file of all parts", file=sys.stderr)
    if busy := contested():
        print(busy, file=sys.stderr)
    return status
