"""One step: draft a tree, score it, verify it, commit the accepted path.

`grow` and `decode_step` are the two algorithms of arXiv:2406.17276, as generators of the forwards that they need, which
are sent what came of each. Plain decoding is the same step with an empty tree.
"""

import dataclasses
import time
import warnings
from dataclasses import dataclass, field
from math import inf, isnan
from typing import Any

from opt_tree.children import LogProbs
from opt_tree.drafter import Drafter, answer_of
from opt_tree.generation import Outcome, Step, StepTimes
from opt_tree.policy import TreePolicy
from opt_tree.request import StopRule, ends_of
from opt_tree.sampling import LazyLogits, Logits, Random, Temperature
from opt_tree.target import Asking, Target, Work
from opt_tree.tree import Tree, on_host, send
from opt_tree.verify import Verifier

_NEAR = 64
"""A drafter whose positions end so near before the target's loses nothing worth a word."""


def grow(
    drafter: Drafter | None,
    policy: TreePolicy,
    context: list[int],
    limit: int,
    sampling: Temperature = Temperature(),
    random: Random | None = None,
    root: LogProbs | None = None,
) -> Asking[Tree]:
    """Grow one tree below the last token of the context, at most `limit` layers deep (arXiv:2406.17276, Alg. 1).

    Sampled children are drawn with `random`, from the drafter's distribution as `sampling` warps it. `root`: what the
    drafter says of the token after the context, where it was asked already.
    """
    if limit <= 0 or drafter is None:
        return Tree.of([context[-1]], [-1])  # a root without nodes: plain decoding
    pool = policy.children.pool(context[-1], sampling, random or Random())
    answer = root or (yield from answer_of(drafter, drafter.root(context)))
    while True:
        pool.add(answer)
        rows = policy.expand(pool) if pool.depth < limit else None
        if rows is None or not len(rows):
            return pool.tree(policy.select(pool))
        answer = yield from answer_of(drafter, drafter.expand(pool.frontier(rows)))


def decode_step(run: "Run", policy: TreePolicy, root: LogProbs | None = None) -> Asking[Outcome]:
    """Emit the tokens of one step: an accepted path of drafted tokens and one token of the target's own.

    Source: arXiv:2406.17276, Algorithm 2, with the verifier left open. `root`: see `grow`.
    """
    limit = min(policy.max_depth, run.layers)
    tree = yield from grow(run.drafter, policy, run.context, limit, run.sampling, run.random, root)
    tree = tree.ending_at(run.ends)
    run.lap()
    output = yield run.target.tree(tree)
    if run.drafter is not None:
        run.drafter.scored(output)
    scores = run.sampling.processed(output.logits, tree, run.history)
    verdict = run.verify(tree, scores, run.random)
    run.lap()
    path, tokens = verdict.path, [*tree.tokens[verdict.path[1:]].tolist(), verdict.token]
    features = {layer: states[send(path, states.device)] for layer, states in output.features.items()}  # copies
    outcome = Outcome(tree, path, tokens, features, output.logits)
    run.emitted(outcome, scores)
    run.target.commit(path)
    run.random.advance(len(tokens))
    if run.drafter is not None:
        run.drafter.accept(outcome)
    run.lap()
    return outcome


@dataclass
class Run:
    """One generation under way: what it is made with, and what has come of it so far."""

    target: Target
    drafter: Drafter | None
    verify: Verifier
    sampling: Temperature
    random: Random
    context: list[int]
    """The prompt and every emitted token."""
    end: int
    """The context's length at which the generation is over."""
    stop: StopRule | None = None
    reuse: bool = False
    """Whether the rows of the text before are kept, as far as the prompt begins like it."""
    recorder: Any = None
    """Keeps what the target says of the emitted tokens (see `Decoder.generate`); None: nobody asked."""
    kept: int = 0
    """How many tokens of the prompt the target did not take in anew."""
    prefill: float = 0.0
    """Seconds of the prompt's prefill, until a step has told of them."""
    tokens: list[int] = field(default_factory=list)
    """The new tokens, as far as the stop rule let them come."""
    reason: str | None = None
    """Why the stop rule ended the text; None: it has not."""
    begun: tuple[int, int] = (0, 0)
    """`generations` when the prompt was taken in."""
    laps: list[float] = field(default_factory=list)
    """When the step began, and when each of its parts ended, in seconds of `time.perf_counter`."""

    def __post_init__(self) -> None:
        self.history, self.ends = self.sampling.history(self.context), ends_of(self.stop)

    @property
    def goes_on(self) -> bool:
        """Whether there is a next step."""
        return self.reason is None and len(self.context) < self.end

    @property
    def generations(self) -> tuple[int, int]:
        """How many texts the target and the drafter have begun."""
        return self.target.generation, self.drafter.bare.generation if self.drafter is not None else 0

    @property
    def layers(self) -> int:
        """How many layers of draft there is room for."""
        return layers_left(self.drafter, len(self.context), self.end)

    def lap(self) -> None:
        """Note the time."""
        self.laps.append(time.perf_counter())

    def begin_step(self) -> None:
        """Note what a step begins with. Raises RuntimeError where another text began with the target or the drafter."""
        target, drafter = self.generations
        if target != self.begun[0]:
            raise RuntimeError("another generation began on the same target; wrap the model twice for two")
        if drafter != self.begun[1]:
            raise RuntimeError("another generation began with the same drafter; make two of it to interleave")
        if self.drafter is not None and len(self.context) >= self.drafter.max_context:
            self._warn_of_end(self.drafter)
        self._before, self.laps = self._work(), [time.perf_counter()]

    def end_step(self, tree: Tree, path: list[int], tokens: list[int], policy: TreePolicy) -> Step:
        """Return what is kept of a step, with its cost."""
        begin, drafted, judged, committed = self.laps
        drafting, scoring = (now - before for now, before in zip(self._work(), self._before, strict=True))
        seconds = drafted - begin, judged - drafted, committed - judged, drafting.seconds, scoring.seconds
        times, self.prefill = StepTimes(*seconds, self.prefill), 0.0
        if tree.draft_log_probs is not None:  # a step may be kept; at 128 thousand tokens these are 15 MB
            tree = dataclasses.replace(tree, draft_log_probs=None)
        return Step(tree, path, tokens, policy, drafting.forwards, drafting.tokens, times)

    def extend(self, tokens: list[int]) -> None:
        """Add what a step emitted to the text, up to where the stop rule ends it."""
        self.context.extend(tokens)
        for token in tokens:
            self.tokens.append(token)
            self.reason = None if self.stop is None else self.stop(self.tokens)
            if self.reason is not None:
                break

    def emitted(self, outcome: Outcome, scores: Logits) -> None:
        """Raise ValueError for an emitted token without probability; show what was emitted to the recorder.

        `scores`: the processed logits of the tree's rows. At temperature 0 NaN alone counts: a row without an allowed
        token is answered by some token, as by transformers. On a device a look would wait for it: there is none.
        """
        if isinstance(scores, LazyLogits) or on_host(scores):
            for row, token in zip(outcome.path, outcome.tokens, strict=True):
                value = float(scores[row][token])
                # One logit of the row that is NaN or infinite leaves no probabilities.
                most = value if self.sampling.greedy else float(scores[row].max())
                if isnan(most) or (inf in (most, -value) and not self.sampling.greedy):
                    why = self.sampling.why_none(outcome.logits, outcome.tree, self.history, row)
                    raise ValueError(f"no token can be drawn at row {row} of a tree of {len(outcome.tree)}: {why}")
        if self.recorder is not None:
            self.recorder.add(outcome.logits, scores, outcome.path, outcome.tokens)

    def _work(self) -> tuple[Work, Work]:
        """What the drafter and the target have done so far."""
        return Work() if self.drafter is None else self.drafter.work, self.target.work

    def _warn_of_end(self, drafter: Drafter) -> None:
        """Warn, once a drafter, that the context has come behind its last position, where the target goes on."""
        target, length = self.target, len(self.context)
        if drafter.bare.ended or drafter.max_context + _NEAR > target.max_context:
            return
        drafter.bare.ended = True
        rest = "the table drafts alone" if drafter.room(length) > 0 else "nothing is drafted"
        warnings.warn(
            f"{drafter.describe()} has positions for {drafter.max_context} tokens of context "
            f"(max_position_embeddings), {target.name} for {target.max_context}: behind the former {rest}",
            stacklevel=2,
        )


def layers_left(drafter: Drafter | None, length: int, end: int) -> int:
    """How many layers of draft a context of `length` tokens that may grow to `end` has room for, in the drafter too."""
    return end - length - 1 if drafter is None else min(end - length - 1, drafter.room(length))


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
    run.begun = run.generations
    run.prefill = time.perf_counter() - begin


def next_step(run: Run, policy: TreePolicy) -> Asking[Step]:
    """Decode one step of a text: ask the policy for the one of this step, and let the policy learn from it."""
    run.begin_step()
    root, drafter = None, run.drafter
    if policy.reads_root and drafter is not None and run.layers > 0:
        root = yield from answer_of(drafter, drafter.root(run.context))
    chosen = policy.choose(run.context, root)
    if chosen not in policy.policies:
        raise ValueError(f"{type(policy).__name__} chose a policy that is not one of its own: {chosen}")
    outcome = yield from decode_step(run, chosen, root)
    step = run.end_step(outcome.tree, outcome.path, outcome.tokens, chosen)
    policy.observe(step, outcome)  # which may read the context that it chose for
    run.extend(step.tokens)
    return step
