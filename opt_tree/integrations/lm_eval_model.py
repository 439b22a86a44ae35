"""A model for lm-eval, the evaluation harness: its generations are drafted, its log-likelihoods are transformers' own.

lm-eval 0.4.13 keeps models in a registry and reads no entry points. So this is its command line with one more model:

    python -m opt_tree.integrations.lm_eval_model run --model opt-tree \\
        --model_args pretrained=demo,nodes=12 --tasks TASKS

The answers are those of `--model hf`; they come sooner. lm-eval is no dependency of the library: `pip install lm-eval`.
"""

import sys

NAME = "opt-tree"


def register() -> None:
    """Make `opt-tree` known to lm-eval, which imports it when it is asked for. ImportError where lm-eval is missing."""
    from lm_eval.api.registry import model_registry

    if NAME not in model_registry:
        model_registry.register(NAME, target="opt_tree.integrations.tree_lm:TreeLM")


def main() -> None:
    """Run lm-eval's command line, where `--model opt-tree` is known."""
    try:
        from lm_eval.__main__ import cli_evaluate
    except ImportError:
        sys.exit("error: lm-eval is not installed: pip install lm-eval")
    register()
    cli_evaluate()


if __name__ == "__main__":
    main()
