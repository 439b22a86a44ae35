"""The `main` of the two published commands. It reads the command line; `runner` does the work."""

from evaluation.command_line import parse, run_command, work_of
from evaluation.run.options import Options


def main(command: str, kind: type[Options], about: str | None, arguments: list[str] | None = None) -> int:
    """Run eval_opt_`command`. Returns 0 when its questions are answered, 1 when some failed, 2 for bad input."""

    def work() -> int:
        options = parse(kind, f"python -m evaluation.eval_opt_{command}", about, arguments)
        return work_of("evaluation.run.runner:answer")(command, options)

    return run_command(work, "stopped; the same command goes on from here")
