"""A chat page: each answer drafted by a tree and, beside it, decoded plainly, each with a clock of its own.

    pip install -r requirements/chat.txt
    python -m examples.chat [--base-model-path smollm2] [--drafter SPEC ...] [--host 0.0.0.0] [--port N] [--share]

The two sides take turns by their clocks: the one that has spent less time makes the next step. So one core shows a fair
race: a side that is twice as fast is twice as far at any moment. `race` and `Room` know nothing of the page, which is
gradio's.
"""

import sys

from opt_tree.system.command_line import Parser, run_command, work_of


def main(arguments: list[str] | None = None) -> int:
    """Serve the page until somebody stops it. Returns 2 for bad input."""
    parser = Parser("python -m examples.chat", __doc__)
    parser.add_argument("--base-model-path", default="demo", help="a folder, a Hub id, or a name such as smollm2")
    parser.add_argument("--drafter", action="append", metavar="SPEC", help="may be given several times")
    parser.add_argument("--dtype", default="auto", help="of the target")
    parser.add_argument("--canonical", action="store_true", help="in bfloat16, too, both sides write the same")
    parser.add_argument("--compile", action="store_true", help="make compiled packages; those there are taken anyway")
    parser.add_argument("--host", default="127.0.0.1", help="0.0.0.0: for other machines, too")
    parser.add_argument("--port", type=int, default=7860)
    parser.add_argument("--share", action="store_true", help="a public address for a week, by gradio's servers")
    return run_command(lambda: work_of("examples.chat:serve")(parser.parse_args(arguments)))


if __name__ == "__main__":
    sys.exit(main())

import argparse
import dataclasses
import html
import importlib.util
import random
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, NoReturn

from opt_tree import (
    CausalLM,
    Decoder,
    Generation,
    OptTree,
    Pair,
    Sampling,
    Static,
    explore,
    load_pair,
    make_canonical,
)
from opt_tree.drafter import Drafter
from opt_tree.errors import counted
from opt_tree.generation import Step
from opt_tree.methods.drafters.registry import DrafterOptions, check_drafter, load_drafter
from opt_tree.methods.policies.registry import make_policy
from opt_tree.models.compiling import compile_forwards
from opt_tree.models.known import KNOWN, drafters_of
from opt_tree.policy import TreePolicy
from opt_tree.request import StopRule
from opt_tree.sampling import Random
from opt_tree.system.command_line import check_port, no_bars_in_logs
from opt_tree.tools.display.page import DARK, LIGHT, STYLE, answer_spans
from opt_tree.tools.display.trees import escape

DEMO = ("eagle:demo", "lm:demo", "exit:demo", "graft:1:eagle:demo+store:demo", "store:demo", "ngram")
TREES = ("opt", "eagle2", "binary", "chain")
# gradio has a dark mode of its own, `?__theme=dark`; what a frame holds follows the colour scheme of the frame.
LOOK = f"""{STYLE}
.gradio-container .opt-tree {{ {LIGHT} max-width: none; padding: .5rem 0; background: none; }}
.dark .gradio-container .opt-tree, .gradio-container.dark .opt-tree {{ {DARK} }}
#trees iframe {{ width: 100%; height: 720px; border: 0; color-scheme: light; }}
.dark #trees iframe {{ color-scheme: dark; }}
#beside {{ min-width: min(240px, 100%) !important; }}
.opt-tree .user, .opt-tree .assistant {{ white-space: pre-wrap; overflow-wrap: anywhere; }}
.opt-tree .user {{ color: var(--faint); border-left: 3px solid var(--line); padding-left: .8rem; }}
.opt-tree .answer:not(.ended)::after {{ content: "▌"; }}
:root:has(body.dark) {{ color-scheme: dark; }}
"""
KEY = (
    f'<style>{LOOK}</style><div class="opt-tree"><p class="legend" style="margin:0">'
    '<span class="drafted">drafted and accepted</span> <span class="own">the target\'s own</span></p></div>'
)
HINT = "Ask below: both sides answer, each with a clock of its own."
ANSWERING = '<p class="answer">'
Message = dict[str, str]


@dataclass(frozen=True)
class Chosen:
    """What a visitor chose."""

    drafter: str
    tree: str = "opt"
    nodes: int = 12
    threshold: float = 0.3
    """Of OPT-Tree: the least gain in E(A) worth one more layer."""
    temperature: float = 0.0
    length: int = 200
    """Tokens of an answer at most."""
    beside: bool = True
    """Whether plain decoding runs too."""
    seed: str = ""
    """Of the sampling, a whole number; empty: another one for each answer."""

    @property
    def policy(self) -> TreePolicy:
        return OptTree(self.nodes, self.threshold) if self.tree == "opt" else make_policy(self.tree, self.nodes)


@dataclass
class Runner:
    """One side of the race: an answer that grows a step at a time, and the seconds that it took so far."""

    label: str
    decoder: Decoder
    prompt: list[int]
    length: int
    sampling: Sampling
    stop: StopRule
    seed: int = 0
    seconds: float = 0.0
    ended: str | None = None
    """Why it is over, in the words of `Generation.finish_reason`; None while it is not."""
    tokens: list[int] = field(default_factory=list)
    _done: list[Step] = field(default_factory=list)
    _lengths: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        random = Random(self.seed)
        self._steps = self.decoder.steps(self.prompt, self.length, self.sampling, random, reuse=True, stop=self.stop)

    def advance(self) -> None:
        """Make one step; the first one takes in the prompt."""
        begin, before = time.perf_counter(), len(self.tokens)
        step = next(self._steps, None)
        self.seconds += time.perf_counter() - begin
        if step is None:
            self.ended = "length" if before == self.length else "context"
            return
        for token in step.tokens:
            self.tokens.append(token)
            self.ended = self.stop(self.tokens)
            if self.ended:
                break
        self._done.append(step)
        self._lengths.append(len(self.tokens) - before)

    @property
    def generation(self) -> Generation:
        """What there is of the answer."""
        reason = self.ended or "stopped by the visitor"
        return Generation(self.prompt, list(self.tokens), reason, self._done, self._lengths, self.seconds)


def race(runners: Sequence[Runner]) -> Iterator[Runner]:
    """Let the runner whose clock shows least make the next step, until all have ended; yield it after each step."""
    while running := [runner for runner in runners if runner.ended is None]:
        behind = min(running, key=lambda runner: runner.seconds)
        behind.advance()
        yield behind


class Room:
    """A target, all the drafters that may be chosen for it, and a second cache on the same weights."""

    def __init__(self, name: str, pair: Pair, drafters: dict[str, Drafter], make: bool = False) -> None:
        """`make`: make compiled packages that are not there yet."""
        self.name, self.pair, self.drafters, self._make = name, pair, drafters, make
        self._beside = CausalLM(pair.target.model)
        make_canonical(self._beside, getattr(pair.target, "canonical", False))
        compile_forwards(self._beside, make)  # or the race would not be fair
        self._ready: str | None = None
        """The drafter for which the target's compiled package was looked up."""

    def runners(self, messages: Sequence[Message], chosen: Chosen) -> list[Runner]:
        """The sides of one answer. Raises ValueError for what does not go together."""
        prompt = self.pair.encode(list(messages))
        drafter, target = self.drafters[chosen.drafter], self.pair.target
        sides = {f"{chosen.drafter}, {chosen.tree}": Decoder(target, drafter, chosen.policy)}
        if chosen.drafter != self._ready:  # a package belongs to the layers that a drafter reads
            dataclasses.replace(self.pair, drafter=drafter).compile(self._make)
            self._ready = chosen.drafter
        if chosen.beside:
            sides["plain decoding"] = Decoder(self._beside, None, Static.empty())
        given = (prompt, chosen.length, Sampling(chosen.temperature), self.pair.stop)
        typed = chosen.seed.strip()
        if typed and not typed.isdecimal():
            raise ValueError(f"the seed is a whole number or empty, not {typed!r}")
        seed = int(typed) if typed else random.randrange(2**31)
        return [Runner(label, side, *given, seed) for label, side in sides.items()]

    def text(self, runner: Runner) -> str:
        """An answer as the next turn's prompt has it."""
        return str(self.pair.tokenizer.decode(runner.tokens, skip_special_tokens=True))


def ended(side: str) -> str:
    """One side as HTML, without the caret of an answer that is being written."""
    return side.replace(ANSWERING, '<p class="answer ended">')


def stopped(*shown: str) -> list[str]:
    """What the page shows after Stop: the sides, and what is said of them."""
    *sides, note = shown
    return [*map(ended, sides), "Stopped." if any(ANSWERING in side for side in sides) else note]


def compared(runners: Sequence[Runner]) -> str:
    """What there is to say of an answer when both sides are over: the speed-up, the seed, where the texts part."""
    lines = []
    if len(runners) == 2 and all(runner.seconds and runner.tokens for runner in runners):
        ours, plain = (len(runner.tokens) / runner.seconds for runner in runners)
        lines.append(f"**{ours / plain:.2f} times** as fast as plain decoding: {ours:.1f} and {plain:.1f} tokens/s.")
        pairs = enumerate(zip_longest(*(runner.tokens for runner in runners)))
        apart = next((place for place, (one, other) in pairs if one != other), None)
        if apart is not None:
            dtype = str(getattr(runners[0].decoder.target, "dtype", "this dtype")).removeprefix("torch.")
            lines.append(
                f"The texts part at token {apart + 1}: in {dtype} rounding can decide between two tokens that are "
                "nearly equally good. Both texts are the target's; `--canonical` or `--dtype float32` makes them one."
            )
    if not runners[0].sampling.greedy:
        lines.append(f"Seed {runners[0].seed} gives this text again.")
    return " ".join(lines)


def said(messages: Sequence[Message]) -> str:
    """A conversation as HTML."""
    return "".join(f'<p class="{turn["role"]}">{html.escape(turn["content"])}</p>' for turn in messages)


def asked(messages: Sequence[Message]) -> str:
    """One side as HTML before its first step, which may wait for other visitors' answers."""
    return f'<div class="opt-tree">{said(messages)}{ANSWERING}</p></div>'


def drawn(room: Room, messages: Sequence[Message], runner: Runner) -> str:
    """One side as HTML: what was said before, the answer as far as it is, and the clock."""
    found = runner.generation
    speed = f"{len(found.tokens) / runner.seconds:.0f} tokens/s" if runner.seconds else ""
    length = f"{counted(len(found.tokens), 'token')} · {found.mean_acceptance_length:.2f} a step"
    head = f'<p class="legend"><b>{escape(runner.label)}</b> {runner.seconds:.2f} s · {speed} · {length}</p>'
    return (
        f'<div class="opt-tree">{head}{said(messages)}{ANSWERING}{answer_spans(found, room.pair.tokenizer)}</p></div>'
    )


Shown = tuple[list[Message], list[str], str, str]
"""The conversation so far, both sides, what there is to say of them, the page of trees."""


def answers(room: Room, messages: list[Message], chosen: Chosen) -> Iterator[Shown]:
    """Answer the last message. Yields what there is after each step; in the end, all of it."""
    runners = room.runners(messages, chosen)
    sides = [drawn(room, messages, runner) for runner in runners]
    for runner in race(runners):
        side = drawn(room, messages, runner)
        sides[runners.index(runner)] = ended(side) if runner.ended else side
        so_far = [*messages, {"role": "assistant", "content": room.text(runners[0])}]
        yield so_far, sides, "Answering.", ""
    page = explore(runners[0].generation, room.pair.tokenizer)
    frame = f'<iframe srcdoc="{html.escape(page)}"></iframe>'
    yield so_far, sides, compared(runners), frame


def chosen_on(gr: Any, names: list[str], known: Any) -> list[Any]:
    """Make the controls that `Chosen` is read from, in its order: closed, so that a phone shows the conversation."""
    with gr.Accordion("Settings", open=False, elem_id="settings"):
        with gr.Row():
            settings = [
                gr.Dropdown(names, value=names[0], label="drafter"),
                gr.Dropdown(list(TREES), value="opt", label="tree"),
                gr.Slider(1, 64, known.nodes if known else 12, step=1, label="nodes", min_width=240),
                gr.Slider(0, 1, known.threshold if known else 0.3, step=0.01, label="threshold", min_width=240),
            ]
        with gr.Row():
            settings += [
                gr.Slider(0, 1.5, 0, step=0.1, label="temperature", min_width=240),
                gr.Slider(16, 1024, 200, step=8, label="tokens", min_width=240),
                gr.Checkbox(True, label="beside: plain decoding", elem_id="beside"),
                gr.Textbox("", label="seed", placeholder="empty: another for each answer"),
            ]
    return settings


def page(room: Room, known: Any) -> Any:
    """The page itself. `known` holds the model's own nodes and threshold, or None."""
    gr: Any = importlib.import_module("gradio")  # an extra, which the race does without

    def ask(message: str, turns: list[Message], *settings: Any) -> tuple[Any, ...]:
        """Show the question at once: it is answered when those of other visitors are."""
        if not message.strip():
            raise gr.Error("There is no message.")
        side = asked([*turns, {"role": "user", "content": message.strip()}])
        return "", message, side, side if Chosen(*settings).beside else "", "Answering."

    def reply(message: str, turns: list[Message], *settings: Any) -> Iterator[tuple[Any, ...]]:
        messages = [*turns, {"role": "user", "content": message.strip()}]
        typed = gr.skip()  # what the visitor has typed meanwhile stays
        try:
            for so_far, sides, note, trees in answers(room, messages, Chosen(*settings)):
                yield typed, so_far, *(sides if len(sides) > 1 else [*sides, ""]), note, so_far[-1]["content"], trees
        except ValueError as error:  # a context that is full, a tree that does not fit its nodes
            side = asked(turns).replace(f"{ANSWERING}</p>", "")
            yield message, turns, side, "", f"**{escape(str(error))}**", "", ""

    def again(_: str, turns: list[Message], *settings: Any) -> Iterator[tuple[Any, ...]]:
        places = [place for place, turn in enumerate(turns) if turn["role"] == "user"]
        if not places:
            raise gr.Error("There is no answer yet.")
        yield from reply(turns[places[-1]]["content"], turns[: places[-1]], *settings)

    with gr.Blocks(title="opt_tree chat", fill_width=True) as blocks:
        gr.Markdown(f"### {room.name}: drafted by a tree, and plainly beside it")
        settings = chosen_on(gr, list(room.drafters), known)
        gr.HTML(KEY)
        with gr.Row():
            panes = []
            for side in ("drafted", "plain"):
                with gr.Column(min_width=300):
                    panes.append(gr.HTML(elem_id=side))
        note = gr.Markdown(HINT, elem_id="note", min_height=80)  # what says the queue needs as much
        turns, question = gr.State([]), gr.State("")
        with gr.Row():
            message = gr.Textbox(label="message", scale=6, min_width=300, elem_id="message")
            send = gr.Button("Send", variant="primary", min_width=90)
            stop, repeat = gr.Button("Stop", min_width=90), gr.Button("Regenerate", min_width=130)
            new = gr.Button("New", min_width=90)
        with gr.Accordion("The last answer as Markdown", open=False):
            text = gr.Markdown(elem_id="markdown")
        with gr.Accordion("The trees of the last answer", open=False):
            trees = gr.HTML(elem_id="trees")
        # One answer at a time: all visitors share the target's cache. Who waits sees his place in the queue.
        shared = {"concurrency_limit": 1, "concurrency_id": "target"}
        shared |= {"show_progress": "full", "show_progress_on": note}
        shown = [message, turns, *panes, note, text, trees]
        given = [message, turns, *settings]
        told = [message, question, *panes, note]
        shows = [act(ask, given, told, queue=False, show_progress="hidden") for act in (send.click, message.submit)]
        runs = [show.success(reply, [question, *given[1:]], shown, **shared) for show in shows]
        runs.append(repeat.click(again, given, shown, **shared))
        stop.click(stopped, [*panes, note], [*panes, note], cancels=runs)
        new.click(lambda: ("", [], "", "", HINT, "", ""), None, shown, cancels=runs)
    return blocks


def load(arguments: argparse.Namespace) -> Room:
    """Load the target and every drafter now: what cannot be had is said before the page opens."""
    path = arguments.base_model_path
    specs = arguments.drafter or (DEMO if path == "demo" else (*drafters_of(path), "ngram"))
    pair = load_pair(path, specs[0], dtype=arguments.dtype, canonical=arguments.canonical)
    options = DrafterOptions(pair.tokenizer)
    others = {spec: load_drafter(spec, pair.target, options) for spec in specs[1:]}
    return Room(path, pair, {specs[0]: pair.drafter, **others}, arguments.compile)


def serve(arguments: argparse.Namespace) -> NoReturn:
    """Serve the page until somebody stops it. Raises ValueError, before a model is loaded, for what is missing."""
    no_bars_in_logs(wanted=arguments.base_model_path != "demo")
    for spec in arguments.drafter or ():
        check_drafter(spec)
    if importlib.util.find_spec("gradio") is None:
        raise ValueError("the page needs gradio: pip install -r requirements/chat.txt")
    check_port(arguments.host, arguments.port)
    blocks = page(load(arguments), KNOWN.get(arguments.base_model_path))
    place = {"server_name": arguments.host, "server_port": arguments.port, "share": arguments.share}
    blocks.launch(**place, prevent_thread_lock=True)
    try:  # gradio's own wait ends with status 0 on Ctrl-C
        while True:
            threading.Event().wait()
    finally:
        blocks.close(verbose=False)
