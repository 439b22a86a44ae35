"""Answer a question by a draft tree and plainly, and show which tokens were drafted.

It runs from an installed copy, in any folder. In a clone `python demo_opt_classic.py` compares more ways, and times
them.
"""

import sys
from dataclasses import dataclass

from opt_tree.system.command_line import option, parse, run_command, work_of


@dataclass(frozen=True)
class DemoOptions:
    """What is asked, and of whom."""

    target: str = option("demo", "a path, a Hub id, or a name that `opt-tree models` lists")
    drafter: str | None = option(None, "what drafts, KIND:PATH; by default what belongs to the target")
    prompt: str = option("Give me an overview of the economy of Iceland.", "the question")
    max_new_tokens: int = option(96, "of the answer, at most")
    nodes: int = option(16, "of a tree, at most")
    threshold: float = option(0.2, "of OPT-Tree: what another layer must add to E(A)")
    html: str | None = option(None, "write the page to step through here, too")


def main(arguments: list[str] | None = None) -> int:
    """Run the command; return 2, after one line on stderr, for what cannot be done."""
    return run_command(
        lambda: work_of("opt_tree.tools.display.demo:show")(parse(DemoOptions, "opt-tree demo", __doc__, arguments))
    )


if __name__ == "__main__":
    sys.exit(main())

from pathlib import Path

from opt_tree.decoder import Decoder
from opt_tree.errors import counted
from opt_tree.policy import OptTree
from opt_tree.system.files import write_text
from opt_tree.tools.display.explorer import explore
from opt_tree.tools.display.transcripts import transcript
from opt_tree.tools.pair import load_pair
from opt_tree.tools.presets import plain


def show(options: DemoOptions) -> None:
    """Print the answer, what it took, and whether plain decoding writes the same."""
    policy = OptTree(options.nodes, options.threshold)
    pair = load_pair(options.target, options.drafter)
    prompt = pair.encode(options.prompt)
    ours = Decoder(pair.target, pair.drafter, policy).generate(prompt, options.max_new_tokens)
    base = plain(pair.target).generate(prompt, options.max_new_tokens)
    print(pair, f"{policy}\n\n> {options.prompt}\n", f"{transcript(ours, pair.tokenizer)}\n", sep="\n")
    steps = counted(len(ours.steps), "step")
    print(f"{counted(len(ours.tokens), 'token')} in {steps}: {ours.mean_acceptance_length:.2f} a step")
    print(f"plain decoding writes {'the same text' if ours.tokens == base.tokens else 'another text'}")
    if options.html:
        write_text(Path(options.html), explore(ours, pair.tokenizer))
        print(f"wrote {options.html}")
