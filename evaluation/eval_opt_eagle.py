"""OPT-Tree with an EAGLE head, on a question set: the published command, resumable.

    python -m evaluation.eval_opt_eagle --ea-model-path ... --base-model-path ... --bench-name mt_bench \\
        --answer-file ./mt_eagle_opt.jsonl --temperature 0 --nodes 60 --threshold 0.5 --max_depth 10

Without models named, the embedded pair. All else, several processes too, is as in `evaluation.eval_opt_classic`.
"""

import sys

from evaluation.command_line import main_of
from evaluation.run.options import STOPPED, EagleOptions

main = main_of("evaluation.eval_opt_eagle", EagleOptions, __doc__, "evaluation.eval_opt_classic:run", STOPPED)

if __name__ == "__main__":
    sys.exit(main())
