"""Question set in, answer file out: what both evaluation commands share.

Owns the order of work and which answers still lack; a run that dies goes on where it was. Decodes nothing itself.
"""

import hashlib
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from evaluation.answers.file import AnswerFile, Record
from evaluation.command_line import as_command, parse
from evaluation.questions.prompts import Prompter, get_template
from evaluation.questions.sets import Question, QuestionSet, load_set, select
from evaluation.run.conversation import Answer, Conversation, History, side_by_side
from evaluation.run.inflate import describe
from evaluation.run.machine import environment
from evaluation.run.models import load_run, make_method, place, relaunch, resolved
from evaluation.run.options import Options
from evaluation.run.processes import LostProcess, Processes
from evaluation.run.works import DRAFTING, Work, begin, check_parts, check_same, collect, finish, held, prepare
from evaluation.timing import schedule
from opt_tree import Pair

PLACE = {
    *("bench_name", "question_file", "data_dir", "fetch", "question_begin", "question_end", "limit", "history"),
    *("answer_file", "overwrite", "baseline", "json"),
    *("device", "threads", "dtype", "compile", "unpacked", "num_gpus_per_model", "num_gpus_total", "max_gpu_memory"),
}
"""Options that say where, or which part, or are settings under another name: they change no answer themselves."""
_WARM_UP = "Count from one to ten."


def main(command: str, kind: type[Options], about: str | None, arguments: list[str] | None = None) -> int:
    """Run eval_opt_`command`. Returns 0 when every question is answered, 1 when some failed, 2 for bad input."""
    processes = Processes()
    try:
        options = parse(kind, f"python -m evaluation.eval_opt_{command}", about, arguments)
        relaunch(command, options, sys.argv[1:] if arguments is None else arguments)
        processes = Processes.join()
        with as_command():
            return run(command, options, processes)
    except (ValueError, OSError) as error:
        if processes.leads:
            print(f"error: {error}", file=sys.stderr)
        return 2
    except LostProcess as error:
        print(f"error: {error}; the same command goes on from here", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopped; the same command goes on from here", file=sys.stderr)
        return 130
    finally:
        processes.leave()


def run(command: str, options: Options, processes: Processes = Processes()) -> int:
    """Answer what has no answer yet and put the files in order. Raises ValueError and OSError for bad input."""
    questions = load_set(options.bench_name, options.question_file, options.data_dir, options.fetch)
    chosen = select(questions.questions, options.question_begin, options.question_end, options.limit)
    device = place(options, processes)
    if options.conv_template:
        get_template(options.conv_template)
    history = read_history(options.history, chosen, options.num_choices)
    works = plan(command, options, questions, device.partition(":")[0])
    order = [question.id for question in questions.questions]
    with held(works, processes):
        processes.lead(lambda: prepare(works, order, options.overwrite))
        processes.agree(lambda: check_parts(works, processes.rank))
        pair = load_run(options, device)
        prompter = Prompter(pair.tokenizer, pair.stop, options.conv_template, options.system_message)
        works = [work.resolve(resolved(pair)) for work in works]
        methods = {work.method: make_method(work.method, options, pair, prompter) for work in works}
        settings = processes.told(lambda: [work.settings for work in works])
        processes.agree(lambda: check_same(works, settings))
        session = describe_session(options, questions, pair, processes)
        asked = f"{questions.name}, {len(chosen)} questions of {questions.path}"
        processes.lead(lambda: begin(works, options.overwrite, session, asked))
        collect(works, order, processes, drop=options.overwrite)
        conversation = Conversation(
            prompter, options.max_new_token, options.num_choices, options.seed, history, options.reuse
        )
        answer_all(processes, works, methods, chosen, conversation, options.batch_size)
        failed = 0
        try:
            collect(works, order, processes)
        finally:  # also where others are lost: what is missing has a name
            if processes.leads:
                failed = finish(works, order, {question.id for question in chosen}, options.json)
    return 1 if failed else 0


def describe_session(options: Options, questions: QuestionSet, pair: Pair, processes: Processes) -> dict[str, Any]:
    """What the header says of this run, besides its settings."""
    return {
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "options": options.as_dict(),
        "questions": str(questions.path),
        "target": describe(pair.target.model, pair.drafter)
        or f"{pair.target.name}, {pair.target.model.num_parameters() / 1e6:.1f}M parameters",
        "processes": processes.size,
        "environment": environment(pair.target.device),
    }


def plan(command: str, options: Options, questions: QuestionSet, device: str) -> list[Work]:
    """The method asked for and, with --baseline, plain decoding and transformers' generate beside it."""
    default = f"{questions.name}-{command}-{options.method}.jsonl"
    path = Path(default if options.answer_file is None else options.answer_file).expanduser()
    model = options.model_id or Path(options.base_model_path.rstrip("/")).name
    settings = {key: value for key, value in options.as_dict().items() if key not in PLACE}
    settings |= {
        "model_id": f"{model}-temperature-{options.temperature}",
        "device": device,
        # None for the headers of before, and for those that never heard of it.
        "batch_size": options.batch_size if options.batch_size > 1 else None,
        "reuse": options.reuse or None,
        "questions_sha256": questions.sha256,
        "history_sha256": hashlib.sha256(Path(options.history).expanduser().read_bytes()).hexdigest()
        if options.history
        else None,
    }
    bare = {key: value for key, value in settings.items() if key not in DRAFTING}
    works = [Work(options.method, AnswerFile(path), bare if options.method == "none" else settings)]
    baselines = ("transformers",) if options.method == "none" else ("plain", "transformers")
    for name in baselines if options.baseline else ():
        beside = path.with_name(f"{path.name.removesuffix('.jsonl')}.{name}.jsonl")
        named = {"model_id": f"{settings['model_id']}-{name}", "method": name}
        works.append(Work(name, AnswerFile(beside), bare | named))
    return works


def answer_all(
    processes: Processes,
    works: Sequence[Work],
    methods: dict[str, Answer],
    chosen: Sequence[Question],
    conversation: Conversation,
    batch_size: int = 1,
) -> None:
    """Answer this process's share, one method after the other where questions go side by side.

    A question that fails is recorded, and the next one begun.
    """
    done = processes.told(
        lambda: {work.method: {record["question_id"] for record in work.file.read()} for work in works}
    )
    share = processes.share(chosen)
    todo = [question for question in share if any(question.id not in done[work.method] for work in works)]
    if todo:
        for method in methods.values():  # untimed: first calls pay for what later ones find ready
            method(conversation.prompter.encode([_WARM_UP], []), min(16, conversation.max_new_tokens), 0)

    def task(work: Work, question: Question) -> Callable[[Answer], None]:
        file = work.file if processes.size == 1 else work.file.part(processes.rank)
        return lambda method: answer_one(file, work, method, question, conversation)

    shown: dict[str, Any] = {"desc": "questions", "disable": not processes.leads}
    if batch_size == 1:
        progress = tqdm(todo, total=len(share), initial=len(share) - len(todo), **shown)
        for work, question in schedule(works, progress):
            if question.id not in done[work.method]:
                task(work, question)(methods[work.method])
        return
    for work in works:
        tasks = [task(work, question) for question in todo if question.id not in done[work.method]]
        ended = side_by_side(methods[work.method], tasks, batch_size)
        for _ in tqdm(ended, total=len(share), initial=len(share) - len(tasks), **shown):
            pass


def answer_one(file: AnswerFile, work: Work, method: Answer, question: Question, conversation: Conversation) -> None:
    """Answer one question by one method and write the answer, or the failure, down."""
    record: Record = {
        "question_id": question.id,
        "answer_id": work.answer_id(question.id),
        "model_id": work.settings["model_id"],
        "category": question.category,
    }
    try:
        choices = conversation.answer(question, method)
    except Exception as error:  # out of memory, a prompt too long: the other questions still count
        why = " ".join(str(error).split()) or "no message"
        file.append_failed(record | {"failed": f"{type(error).__name__}: {why}", "tstamp": time.time()})
        tqdm.write(f"failed: {work.method}, question {question.id}: {type(error).__name__}: {why}", sys.stderr)
    else:
        file.append(record | {"choices": choices, "tstamp": time.time()})
        work.file.drop_aside()


def read_history(file: str | None, chosen: Sequence[Question], choices: int) -> History | None:
    """Read the turns of another answer file; ValueError if it lacks any that are needed."""
    if file is None:
        return None
    path = Path(file).expanduser()
    if not path.is_file():
        raise FileNotFoundError(f"no answer file {file} to take the history from")
    turns = {
        record["question_id"]: [choice["turns"] for choice in record["choices"]] for record in AnswerFile(path).read()
    }
    for question in chosen:
        there, needed = turns.get(question.id, []), len(question.turns) - 1
        if needed and (len(there) < choices or any(len(choice) < needed for choice in there)):
            raise ValueError(f"--history {file} lacks answers to question {question.id}")
    return turns
