"""OPT-Tree with an independent draft model, on a question set: the published command, resumable.

    python -m evaluation.eval_opt_classic --draft-model-path ... --base-model-path ... --bench-name mt_bench \\
        --answer-file ./mt_classic_opt.jsonl --temperature 0 --nodes 60 --threshold 0.5 --max_depth 10

Without models named, the embedded pair. Several processes, on GPUs or a CPU, one machine or more, share the questions:

    accelerate launch --multi_gpu --num_processes N -m evaluation.eval_opt_classic ...

Each writes a part of its own beside the answer file; `python -m evaluation.report` makes one file of them.
"""

import sys

from evaluation.command_line import main_of
from evaluation.run.options import STOPPED, Options

main = main_of("evaluation.eval_opt_classic", Options, __doc__, "evaluation.eval_opt_classic:run", STOPPED)

if __name__ == "__main__":
    sys.exit(main())

from dataclasses import replace

from evaluation.command_line import print_json
from evaluation.questions.prompts import Prompter
from evaluation.report import print_report
from evaluation.run.conversation import Conversation
from evaluation.run.models import load_run, read_questions
from evaluation.run.processes import Processes, place
from evaluation.run.work import answers, begin, held, plan, sum_up


def run(options: Options) -> int:
    """Load, answer each question by each method, append a line for each answer, sum up.

    Returns 1 where a question of this process failed, else 0. Raises ValueError and OSError for bad input.
    """
    questions, chosen = read_questions(options)
    processes = Processes.launched()
    device = place(options, processes)
    options = replace(options.on(device), device=device)
    works = plan(options, questions, processes)
    with held(works):
        pair = load_run(options, device)
        prompter = Prompter(pair.tokenizer, pair.stop, options.conv_template)
        conversation = Conversation(prompter, options.max_new_token, options.num_choices, options.seed)
        works = [work.loaded(options, pair, prompter) for work in works]
        begin(works, options, pair, questions, processes)
        share = processes.share(chosen)
        for work, question, found in answers(works, share, conversation, options.batch_size):
            work.write(question, found)
    status = sum_up(works, share)
    if processes.size == 1:
        for work in works:
            work.whole.join([question.id for question in questions.questions])
        if files := [work.whole.path for work in works if work.whole.path.is_file()]:
            print_json(options.json, print_report(files, files[1] if len(files) > 1 else None))
    return status
