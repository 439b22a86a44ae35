"""One step: draft a tree, score it, verify it, commit the accepted path. Nothing else generates tokens with a target.

`decode_step` is the algorithm, a generator of the forwards that it needs, which is sent what came of each. Plain
decoding is the same step with an empty tree.
"""

import dataclasses
import time
from dataclasses import dataclass, field
from math import inf, isnan
from typing import Any

import numpy as np

from opt_tree.answers import LogProbs
from opt_tree.drafter import Drafter
from opt_tree.generation import Outcome, Step, StepTimes
from opt_tree.grow import Asking, answer_of, grow, layers_left, warn_of_end
from opt_tree.policy import TreePolicy, check_grows
from opt_tree.random import Random
from opt_tree.sampling import LazyLogits, Logits, Temperature
from opt_tree.target import Target, Work
from opt_tree.tree import on_host, send
from opt_tree.verify import Verifier, check


def decode_step(run: "Run", policy: TreePolicy, verify: Verifier, root: LogProbs | None = None) -> Asking[Outcome]:
    """Emit the tokens of one step: an accepted path of drafted tokens and one token of the target's own.

    Source: arXiv:2406.17276, Algorithm 2, with the verifier left open.
    """
    limit = min(policy.max_depth, run.layers)
    tree = yield from grow(run.drafter, policy, run.context, limit, run.sampling, run.random, root)
    tree = tree.ending_at(run.ends)
    run.lap()
    output = yield run.target.tree(tree)
    if run.drafter is not None:
        run.drafter.scored(output)
    scores = run.sampling.processed(output.logits, tree, run.history)
    verdict = verify(tree, scores, run.random)
    run.lap()
    drafted = tree.tokens.tolist()
    tokens = [*(drafted[row] for row in verdict.path[1:]), verdict.token]
    path = np.array(verdict.path)
    features = {layer: states[send(path, states.device)] for layer, states in output.features.items()}  # copies
    outcome = Outcome(tree, verdict.path, tokens, features, output.logits)
    run.emitted(outcome, scores)
    run.target.commit(verdict.path)
    run.random.advance(len(tokens))
    if run.drafter is not None:
        run.drafter.accept(outcome)
    run.lap()
    return outcome


@dataclass
class Run:
    """One generation under way: what stays the same from step to step, and the context."""

    target: Target
    context: list[int]
    end: int
    """The context's length at which the generation is over."""
    sampling: Temperature
    random: Random
    drafter: Drafter | None
    verify: Verifier
    reuse: bool
    """Whether the rows of the text before are kept, as far as the prompt begins like it."""
    kept: int = 0
    """How many tokens of the prompt these are."""
    prefill: float = 0.0
    """Seconds of the prompt's prefill, until a step has told of them."""
    ends: frozenset[int] = frozenset()
    """The tokens at which the generation is known to stop."""
    recorder: Any = None
    """Keeps what the target says of the emitted tokens (see `Decoder.generate`); None: nobody asked."""
    laps: list[float] = field(default_factory=list)
    """When the step began, and when each of its parts ended, in seconds of `time.perf_counter`."""

    def __post_init__(self) -> None:
        self.history = self.sampling.history(self.context)
        self._begun = (0, 0)

    def begun(self) -> None:
        """Note, when the prompt is taken in, whose text these models hold; `check_alone` compares before every step."""
        self._begun = self._generations

    def check_alone(self) -> None:
        """Raise RuntimeError where another generation began with the target or the drafter."""
        target, drafter = self._generations
        if target != self._begun[0]:
            raise RuntimeError("another generation began on the same target; wrap the model twice for two")
        if drafter != self._begun[1]:
            raise RuntimeError("another generation began with the same drafter; make two of it to interleave")

    def emitted(self, outcome: Outcome, scores: Logits) -> None:
        """Raise ValueError for an emitted token without probability; show what was emitted to the recorder.

        A verifier answers some token for any row of numbers. At temperature 0 a row without an allowed token is
        answered by some token, as by transformers, and NaN alone counts. On a device a look at the numbers would wait
        for it: there is none. `scores`: the processed logits of the tree's rows.
        """
        if isinstance(scores, LazyLogits) or on_host(scores):
            for row, token in zip(outcome.path, outcome.tokens, strict=True):
                value = float(scores[row][token])
                if isnan(value) or (value == -inf and not self.sampling.greedy):
                    why = self.sampling.why_none(outcome.logits, outcome.tree, self.history, row)
                    raise ValueError(f"no token can be drawn at row {row} of a tree of {len(outcome.tree)}: {why}")
        if self.recorder is not None:
            self.recorder.add(outcome.logits, scores, outcome.path, outcome.tokens)

    @property
    def _generations(self) -> tuple[int, int]:
        return self.target.generation, self.drafter.bare.generation if self.drafter is not None else 0

    @property
    def layers(self) -> int:
        """How many layers of draft there is room for."""
        return layers_left(self.target, self.drafter, len(self.context), self.end)

    @property
    def draft_work(self) -> Work:
        return Work() if self.drafter is None else self.drafter.work

    def lap(self) -> None:
        """Note the time."""
        self.laps.append(time.perf_counter())


def prefill(run: Run, policy: TreePolicy) -> Asking[None]:
    """Take in the prompt without its last token, which is the first root; of a text that goes on, what is new.

    One token is taken in anyway: drafters and policies read what the target says of the last one.
    """
    begin, prompt, target, drafter = time.perf_counter(), run.context, run.target, run.drafter
    if target.ranks is not None:
        target.ranks.check_led(target.name)
    if run.reuse:
        most = len(prompt) - 2
        run.kept = target.keep(prompt, most if drafter is None else min(most, drafter.keeps(prompt)))
    else:
        target.reset()
    all_logits = drafter is not None and drafter.reads_logits
    output = (yield target.text(prompt[run.kept : -1], all_logits=all_logits)) if len(prompt) > 1 else None
    if drafter is not None:
        drafter.bare.generation += 1
        drafter.begin(prompt, run.kept, output, run.sampling)
    policy.begin(prompt, output)
    run.begun()
    run.prefill = time.perf_counter() - begin


def next_step(run: Run, policy: TreePolicy) -> Asking[Step]:
    """Decode one step of a text: ask the policy for the one of this step, and let the policy learn from it."""
    run.check_alone()
    if run.drafter is not None:
        warn_of_end(run.target, run.drafter, len(run.context))
    before, run.laps = (run.draft_work, run.target.work), []
    run.lap()
    root, drafter = None, run.drafter
    if policy.reads_root and drafter is not None and run.layers > 0:
        root = yield from answer_of(drafter, drafter.root(run.context))
    chosen = policy.choose(run.context, root)
    if chosen not in policy.policies:
        raise ValueError(f"{type(policy).__name__} chose a policy that is not one of its own: {chosen}")
    outcome = yield from decode_step(run, chosen, run.verify, root)
    begin, drafted, verified, committed = run.laps
    drafting, scoring = run.draft_work - before[0], run.target.work - before[1]
    times = StepTimes(
        drafted - begin, verified - drafted, committed - verified, drafting.seconds, scoring.seconds, run.prefill
    )
    tree = outcome.tree
    if tree.draft_log_probs is not None:  # a step may be kept; at 128 thousand tokens these are 15 MB
        tree = dataclasses.replace(tree, draft_log_probs=None)
    step = Step(tree, outcome.path, outcome.tokens, chosen, drafting.forwards, drafting.tokens, times)
    policy.observe(step, outcome)
    run.context.extend(step.tokens)
    run.prefill = 0.0
    return step


def check_policies(policy: TreePolicy, drafter: Drafter | None, verifier: Verifier, lossy: bool) -> None:
    """Raise TypeError unless all that a policy may choose grow trees that can be drafted and judged here."""
    for known in policy.policies:
        check_grows(known)
        if known.max_depth == 0:
            continue  # without children any verifier is exact
        check(verifier, known.children, lossy)
        name = type(known).__name__
        if drafter is None:
            raise TypeError(f"{name} needs a drafter")
        if drafter.names_few and known.children.sampled:
            raise TypeError(
                f"{type(drafter).__name__} names a few tokens of each node only; {name} draws its children "
                f"({type(known.children).__name__}), which takes a whole distribution: use TopK children"
            )
