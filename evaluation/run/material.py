"""What a command works on: a pair, and the questions that it is asked."""

from dataclasses import dataclass

from evaluation.questions.prompts import Prompter
from evaluation.questions.sets import Question, QuestionSet, load_set, select
from evaluation.run.models import check_device, load
from evaluation.run.options import Asked
from opt_tree import Pair


@dataclass(frozen=True)
class Material:
    """A pair that is loaded, the question set, and those of its questions that were asked for."""

    pair: Pair
    questions: QuestionSet
    chosen: list[Question]
    prompter: Prompter

    def first_prompts(self) -> list[list[int]]:
        """Token ids of the chosen questions' first turns."""
        return [self.prompter.encode(question.turns[:1], []) for question in self.chosen]


def gather(options: Asked, bare: bool = False) -> Material:
    """Read the questions, then load the models; `bare`: without the stored sharpening.

    Raises ValueError and OSError for questions and models that are not there.
    """
    questions = load_set(options.bench_name, options.question_file, options.data_dir, options.fetch)
    chosen = select(questions.questions, options.question_begin, options.question_end, options.limit)
    pair = load(options, check_device(options), bare)
    return Material(pair, questions, chosen, Prompter(pair.tokenizer, pair.stop, options.conv_template))
