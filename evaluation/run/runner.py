"""Question set in, answer file out: what both evaluation commands share.

Owns the order of work and which answers still lack; a run that dies goes on where it was. Decodes nothing itself.
"""

import hashlib
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tqdm import tqdm

from evaluation.answers.file import PATIENCE, AnswerFile, Record
from evaluation.command_line import counted, machine_of, print_json
from evaluation.questions.prompts import Prompter, get_template
from evaluation.questions.sets import Question, QuestionSet
from evaluation.report import print_report
from evaluation.run.conversation import Conversation, read_history, side_by_side
from evaluation.run.inflate import describe
from evaluation.run.models import load_run, make_method, read_questions, resolved
from evaluation.run.options import Options
from evaluation.run.processes import DRAFTING, Processes, Work, place
from evaluation.timing import Method, contested, environment, schedule
from opt_tree import Pair
from opt_tree.core.errors import out_of_memory
from opt_tree.core.files import check_writable
from opt_tree.models.capabilities import size_of

PLACE = {
    *("bench_name", "question_file", "data_dir", "fetch", "question_begin", "question_end", "limit", "history"),
    *("answer_file", "overwrite", "baseline", "json"),
    *("device", "threads", "dtype", "weights", "compile", "unpacked", "canonical", "no_exact"),
    *("num_gpus_per_model", "num_gpus_total", "max_gpu_memory"),
}
"""Options that say where, or which part, or are settings under another name: they change no answer themselves."""
_WARM_UP = "Count from one to ten."


def answer(options: Options) -> int:
    """Run a published command, as one of those launched. Returns 1 when some questions failed, else 0."""
    return run(options, Processes.launched())


def run(options: Options, processes: Processes = Processes(), pair: Pair | None = None) -> int:
    """Answer what has no answer yet and put the files in order. Raises ValueError and OSError for bad input.

    A `pair` that is given is decoded with as it is, instead of one that the options name.
    """
    questions, chosen = read_questions(options)
    device = place(options, processes)
    options = options.on(device)
    if options.conv_template:
        get_template(options.conv_template)
    history = read_history(options.history, chosen, options.num_choices)
    works = plan(options, questions, device.partition(":")[0], processes)
    if pair is not None:
        works = [work.resolve({"drafter": pair.drafter.describe()}) for work in works]
    order = [question.id for question in questions.questions]
    with ExitStack() as locks:
        for work in works:
            check_writable(work.file.path)
            locks.enter_context(work.held())
            if not options.overwrite:
                work.whole.check_settings(work.settings)
                if processes.size == 1:
                    work.whole.fold(order)
        pair = pair or load_run(options, device)
        prompter = Prompter(pair.tokenizer, pair.stop, options.conv_template, options.system_message)
        works = [work.resolve(resolved(pair)) for work in works]
        methods = {work.method: make_method(work.method, options, pair, prompter) for work in works}
        begin(works, describe_session(options, questions, pair, processes), processes)
        print(f"{questions.name}, {counted(len(chosen), 'question')} of {questions.path}", file=sys.stderr)
        conversation = Conversation(
            prompter, options.max_new_token, options.num_choices, options.seed, history, options.reuse
        )
        share = processes.share(chosen)
        answer_all(works, methods, share, conversation, options.batch_size)
    return finish(works, order, chosen, share, options.json)


def describe_session(options: Options, questions: QuestionSet, pair: Pair, processes: Processes) -> dict[str, Any]:
    """What the header says of this run, besides its settings."""
    return {
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "options": options.as_dict(),
        "questions": str(questions.path),
        "target": describe(pair.target.model, pair.drafter) or f"{pair.target.name}, {size_of(pair.target.model)}",
        "processes": processes.size,
        "environment": environment(pair.target.device),
    }


def plan(options: Options, questions: QuestionSet, device: str, processes: Processes) -> list[Work]:
    """The method asked for and, with --baseline, plain decoding and transformers' generate beside it."""
    default = f"{questions.name}-{options.command}-{options.method}.jsonl"
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

    def work(method: str, path: Path, settings: dict[str, Any]) -> Work:
        whole = AnswerFile(path)
        own = whole if processes.size == 1 else whole.part(processes.rank)
        return Work(method, whole, settings, own, options.overwrite)

    works = [work(options.method, path, bare if options.method == "none" else settings)]
    for name, beside in files_beside(path, options).items():
        works.append(work(name, beside, bare | {"model_id": f"{settings['model_id']}-{name}", "method": name}))
    return works


def files_beside(path: Path, options: Options) -> dict[str, Path]:
    """The answer files of the baselines beside one, by their method."""
    baselines = ("transformers",) if options.method == "none" else ("plain", "transformers")
    stem = path.name.removesuffix(".jsonl")
    return {name: path.with_name(f"{stem}.{name}.jsonl") for name in (baselines if options.baseline else ())}


def begin(works: Sequence[Work], session: dict[str, Any], processes: Processes) -> None:
    """Begin a session of every file, now that the models are there, and say what runs where."""
    for work in works:
        if not work.overwrite:
            work.whole.check_settings(work.settings)
        for difference in work.file.begin(work.settings, session, work.replaced(processes)):
            print(f"note: {work.file.path} goes on elsewhere ({difference}): times are not comparable", file=sys.stderr)
    where = session["environment"]
    told = f"{session['target']}, {works[0].settings['target_dtype']}; {machine_of(where)}"
    print(f"{told}, process {processes.rank + 1} of {processes.size}", file=sys.stderr)


def answer_all(
    works: Sequence[Work],
    methods: dict[str, Method],
    share: Sequence[Question],
    conversation: Conversation,
    batch_size: int = 1,
) -> None:
    """Answer this process's share, one method after the other where questions go side by side.

    A question that fails is recorded, and the next one begun.
    """
    done = {work.method: work.done() for work in works}
    todo = [question for question in share if any(question.id not in done[work.method] for work in works)]
    if todo:
        for method in methods.values():  # untimed: first calls pay for what later ones find ready
            method(conversation.prompter.encode([_WARM_UP], []), min(16, conversation.max_new_tokens), 0)

    def task(work: Work, question: Question) -> Callable[[Method], None]:
        return lambda method: answer_one(work, method, question, conversation)

    if batch_size == 1:
        progress = tqdm(todo, total=len(share), initial=len(share) - len(todo), desc="questions")
        for work, question in schedule(works, progress):
            if question.id not in done[work.method]:
                task(work, question)(methods[work.method])
        return
    for work in works:
        tasks = [task(work, question) for question in todo if question.id not in done[work.method]]
        ended = side_by_side(methods[work.method], tasks, batch_size)
        for _ in tqdm(ended, total=len(share), initial=len(share) - len(tasks), desc="questions"):
            pass


def answer_one(work: Work, method: Method, question: Question, conversation: Conversation) -> None:
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
        why = out_of_memory(error) or " ".join(str(error).split()) or "no message"
        work.file.append_failed(record | {"failed": f"{type(error).__name__}: {why}", "tstamp": time.time()})
        tqdm.write(f"failed: {work.method}, question {question.id}: {type(error).__name__}: {why}", sys.stderr)
    else:
        work.file.append(record | {"choices": choices, "tstamp": time.time()})


def finish(
    works: Sequence[Work],
    order: Sequence[int | str],
    asked: Sequence[Question],
    share: Sequence[Question],
    json_line: bool = False,
) -> int:
    """Say what failed of this process's share. The last process makes one file of all parts and prints the table.

    Returns 1 where a question of the share failed or has no answer, else 0.
    """
    status, whole = 0, True
    for work in works:
        with work.whole.lock(PATIENCE):
            answered = {record["question_id"] for record in work.whole.read()}
            failed = {record["question_id"] for record in work.whole.read_failed()}
            missing = [str(question.id) for question in asked if question.id not in answered | failed]
            status |= any(question.id not in answered for question in share)
            last = not missing and not any(part.busy for part in work.whole.parts())
            if last:
                work.whole.fold(order)
            whole = whole and last
        print(f"{counted(len(answered), 'answer')} in {work.whole.path}", file=sys.stderr)
        if failures := [question for question in asked if question.id in failed]:
            where = work.whole.failed_path
            print(f"{len(failures)} failed ({where}); the same command tries them again", file=sys.stderr)
        if missing:
            print(
                f"{len(missing)} have no answer in {work.whole.path} and its parts: {', '.join(missing)}; other "
                "processes answer them, or the same command goes on",
                file=sys.stderr,
            )
    paths = [work.whole.path for work in works if work.whole.path.is_file()]
    if busy := contested():
        print(busy, file=sys.stderr)
    if whole and paths:
        print_json(json_line, print_report(paths, paths[1] if len(paths) > 1 else None))
    return status
