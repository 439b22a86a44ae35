"""The loop: draft a tree, score it, verify it, commit the accepted path. Nothing else generates tokens with a target.

`decode_step` is the algorithm; `Decoder` checks that its parts belong together and repeats it. Plain decoding is the
same loop with an empty tree. The functions of the loop are generators of the forwards that they need and are sent what
came of each: `generate` computes them one by one, `side_by_side.py` those of several texts together.
"""

import dataclasses
import functools
import importlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from opt_tree.core.answers import LogProbs
from opt_tree.core.emitted import refusal, without_choice
from opt_tree.core.errors import require
from opt_tree.core.history import History
from opt_tree.core.log_probs import Recorder, recorder_of
from opt_tree.core.random import Random
from opt_tree.core.sampling import Sampling
from opt_tree.core.step import Outcome, Step, StepTimes
from opt_tree.core.stopping import Stop, StopRule, ends_of, rule_for
from opt_tree.core.target import Target, Work, turn_of
from opt_tree.core.tree import alone, send
from opt_tree.decoding.draft import Asking, answer_of, grow, layers_left, tell_of_end
from opt_tree.decoding.draft import run as run_alone
from opt_tree.decoding.generation import Generation, check_new_tokens, check_others, check_prompt, tell_of_settings
from opt_tree.decoding.side_by_side import SideBySide
from opt_tree.drafters import Drafter
from opt_tree.models.tensor_parallel import at_every_rank
from opt_tree.policies.base import TreePolicy, check_grows
from opt_tree.verifiers import Verifier, check, check_temperature, greedy, match

T = TypeVar("T")


def decode_step(
    run: "Run", drafter: Drafter | None, policy: TreePolicy, verify: Verifier, root: LogProbs | None = None
) -> Asking[Outcome]:
    """Emit the tokens of one step: an accepted path of drafted tokens and one token of the target's own.

    Source: arXiv:2406.17276, Algorithm 2, with the verifier left open.
    """
    limit = min(policy.max_depth, run.layers)
    tree = yield from grow(drafter, policy, run.shown if limit else run.context, limit, run.sampling, run.random, root)
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
    row = without_choice(scores, zip(verdict.path, tokens, strict=True), run.sampling.greedy)
    if row is not None:  # what was emitted there has no probability
        raise refusal(run.sampling, output.logits, tree, run.history, row)
    if run.recorder is not None:
        run.recorder.add(output.logits, scores, verdict.path, tokens)
    path = np.array(verdict.path)
    features = {layer: states[send(path, states.device)] for layer, states in output.features.items()}  # copies
    outcome = Outcome(tree, verdict.path, tokens, features, output.logits)
    run.target.commit(verdict.path)
    run.random.advance(len(tokens))
    if run.drafter is not None:
        hidden = run.shown[-1] != run.context[-1]
        run.drafter.accept(dataclasses.replace(outcome, tree=alone(run.shown[-1])) if hidden else outcome)
    run.lap()
    return outcome


def _check_policies(policy: TreePolicy, drafter: Drafter | None, verifier: Verifier, lossy: bool) -> None:
    """Raise TypeError unless all that a policy may choose grow trees that can be drafted and judged here."""
    if policy.verifier is not None and policy not in policy.policies:
        raise TypeError(f"{type(policy).__name__} chooses policies: a verifier of its own belongs to each of these")
    for known in policy.policies:
        check_grows(known)
        if known.max_depth == 0:
            continue  # without children any verifier is exact
        name = type(known).__name__
        judge = verifier if known.verifier is None else known.verifier
        if not isinstance(judge, Verifier):
            raise TypeError(f"{name} is to be judged by {judge!r}, which is no verifier")
        for one in (greedy, judge):
            check(one, known.children, lossy)
        if drafter is None:
            raise TypeError(f"{name} needs a drafter")
        if drafter.names_few and known.children.sampled:
            raise TypeError(
                f"{type(drafter).__name__} names a few tokens of each node only; {name} draws its children "
                f"({type(known.children).__name__}), which takes a whole distribution: use TopK children"
            )


@dataclass
class Run:
    """One generation under way: what stays the same from step to step, and the context."""

    target: Target
    context: list[int]
    end: int
    """The context's length at which the generation is over."""
    sampling: Sampling
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
    recorder: Recorder | None = None
    """Keeps what the target says of the emitted tokens; None: nobody asked."""
    laps: list[float] = field(default_factory=list)
    """When the step began, and when each of its parts ended, in seconds of `time.perf_counter`."""

    def __post_init__(self) -> None:
        self.history = History(self.context)
        self.shown = self.context
        """What drafters and policies see: 0 in place of ids that have no logit, which no draft may copy."""
        if max(self.context) >= self.target.vocab:
            self.shown = [token if token < self.target.vocab else 0 for token in self.context]
        self._begun = (0, 0)

    def begun(self) -> None:
        """The prompt is taken in: from now on nobody else may begin a text with the same models."""
        self._begun = self._generations

    def check_alone(self) -> None:
        """Raise RuntimeError where another generation began with the target or the drafter."""
        for what, one, now in zip(("target", "drafter"), self._begun, self._generations, strict=True):
            if one != now:
                other = "on the same target; wrap the model twice for two"
                mine = "with the same drafter; make two of it to interleave"
                raise RuntimeError(f"another generation began {other if what == 'target' else mine}")

    def add(self, tokens: list[int]) -> None:
        """Go on by these tokens."""
        self.context.extend(tokens)
        if self.shown is not self.context:
            self.shown.extend(tokens)

    @property
    def _generations(self) -> tuple[int, int]:
        return self.target.generation, self.drafter.bare.generation if self.drafter is not None else 0

    @property
    def layers(self) -> int:
        """How many layers of draft there is room for. None behind an id that drafters do not see."""
        if self.context[-1] >= self.target.vocab:
            return 0
        return layers_left(self.target, self.drafter, len(self.context), self.end)

    @property
    def draft_work(self) -> Work:
        """What the drafter's models have done so far."""
        return Work() if self.drafter is None else self.drafter.work

    def lap(self) -> None:
        """Note the time."""
        self.laps.append(time.perf_counter())


class Decoder(SideBySide):
    """A target, a drafter, a tree policy and a verifier, checked once to belong together.

    Arguments:
        target: whose distribution is reproduced.
        drafter: what proposes tokens; None for plain decoding.
        policy: the tree policy of every step, or a controller, which chooses one for each; all that it may choose are
            checked.
        verifier: who judges above temperature 0, unless the policy of the step names its own. At temperature 0 it is
            `greedy`.
        lossy: whether a verifier is admitted that does not keep the target's distribution.

    A target serves one generation at a time: beginning another one on the same target ends the first. Threads that
    call `generate` take turns; to decode at once, give each a copy.

    Raises TypeError for what is no target, drafter, policy or verifier, and for a policy whose children the verifier
    cannot judge or the drafter cannot give; ValueError for a drafter that runs the target object itself.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        policy: TreePolicy,
        verifier: Verifier = match,
        lossy: bool = False,
    ) -> None:
        if not isinstance(target, Target):
            raise TypeError(f"{type(target).__name__} is no target: opt_tree.wrap(model) makes one of a model")
        if drafter is not None and not isinstance(drafter, Drafter):
            raise TypeError(f"{type(drafter).__name__} is no drafter: opt_tree.load_drafter(spec, target) loads one")
        if not isinstance(policy, TreePolicy):
            raise TypeError(f"{policy!r} is no TreePolicy, such as OptTree(nodes=16)")
        if not isinstance(verifier, Verifier):
            raise TypeError(f"{verifier!r} is no verifier: opt_tree.match is one, opt_tree.verifiers has more")
        if drafter is not None and any(model is target for model in drafter.models):
            raise ValueError(
                f"{target.name} is the target and drafts, too, and one object has one cache: wrap the model twice"
            )
        require(bool, lossy=lossy)
        _check_policies(policy, drafter, verifier, lossy)
        self.target, self.drafter, self.policy, self.verifier = target, drafter, policy, verifier
        self.lanes = 1
        watched = {*policy.features, *(drafter.features if drafter is not None else ())}
        if watched:
            target.watch(tuple(sorted(watched)))

    def __repr__(self) -> str:
        parts = f"{self.target!r}, {self.drafter!r}, {self.policy!r:.90}, {self.verifier.__name__}"
        return f"<{type(self).__name__}: {parts}>"

    @at_every_rank
    def generate(
        self,
        prompt: Sequence[int] | Tensor,
        max_new_tokens: int = 128,
        sampling: Sampling = Sampling(),
        stop: StopRule | None = Stop(),
        streamer: Any = None,
        seed: int = 0,
        reuse: bool = False,
        log_probs: bool | int | Recorder | None = False,
        **others: Any,
    ) -> Generation:
        """Generate after `prompt` until `max_new_tokens`, a stop rule or the end of the target's context.

        Arguments:
            prompt: token ids, a list or a tensor of one row.
            max_new_tokens: how many tokens at most, at least 1.
            sampling: temperature, top-k, top-p and processors; greedy by default.
            stop: asked after every token (see `Stop`). By default the target's own end tokens (`Target.ends`), which
                `Stop(strings=...)` keeps; None: never.
            streamer: one of transformers': it receives the prompt, then the tokens of each step.
            seed: the same one gives the same tokens; judged by `greedy` or `match`, whatever the tree.
            reuse: keep what the target holds of the text that it decoded last, as far as `prompt` begins like it
                (`Generation.reused` tokens), for the turns of a conversation. The text is the same, to rounding.
            log_probs: True: those of the new tokens; a number: also those of so many of the likeliest at each place.

        Raises ValueError for an empty prompt, a batch, a token outside the vocabulary or a prompt that leaves no room,
        for a temperature above 0 with the verifier `greedy`, and TypeError for an argument of another kind.
        """
        if isinstance(sampling, Sampling):
            tell_of_settings(self.target, sampling)
        return self.compute(
            self.answer(prompt, max_new_tokens, sampling, stop, streamer, seed, reuse, log_probs, **others)
        )

    def compute(self, asking: Asking[T]) -> T:
        """Compute every forward that is asked for, one by one, in a turn of this thread; return what comes of it."""
        with self.turn(), torch.inference_mode():  # one mode for all: to enter and leave it in every step is dear
            return run_alone(asking)

    def answer(
        self,
        prompt: Sequence[int] | Tensor,
        max_new_tokens: int = 128,
        sampling: Sampling = Sampling(),
        stop: StopRule | None = Stop(),
        streamer: Any = None,
        seed: int = 0,
        reuse: bool = False,
        log_probs: bool | int | Recorder | None = False,
        **others: Any,
    ) -> Asking[Generation]:
        """Do what `generate` does, as a generator of forwards: what jobs of `side_by_side` yield from."""
        try:
            check_others(others)
            most = check_new_tokens(max_new_tokens)
            if not isinstance(sampling, Sampling):
                raise TypeError(f"sampling must be a Sampling, such as Sampling(temperature=0.7), got {sampling!r}")
            stop = rule_for(stop, self.target.ends)
            if streamer is not None and not callable(getattr(streamer, "put", None)):
                raise TypeError(f"streamer must be one of transformers', with put and end, got {streamer!r:.80}")
            context, recorder = check_prompt(prompt, self.target), recorder_of(log_probs, self.target.vocab)
            run = self._run(context, most, sampling, Random(seed), reuse)
            run.ends, run.recorder = ends_of(stop), recorder
            return (yield from self._answer(run, most, stop, streamer))
        finally:  # whoever reads the stream in another thread would wait for ever
            if callable(getattr(streamer, "end", None)):
                streamer.end()

    def _answer(self, run: Run, max_new_tokens: int, stop: StopRule | None, streamer: Any) -> Asking[Generation]:
        begin, context = time.perf_counter(), list(run.context)
        if streamer is not None:
            streamer.put(torch.tensor([context]))
        tokens: list[int] = []
        steps, lengths, reason = [], [], None
        yield from self._prefill(run)
        while reason is None and len(run.context) < run.end:
            step, before = (yield from self.step(run)), len(tokens)
            for token in step.tokens:
                tokens.append(token)
                reason = stop(tokens) if stop is not None else None
                if reason is not None:
                    break
            steps.append(step)
            lengths.append(len(tokens) - before)
            if streamer is not None:
                streamer.put(torch.tensor(tokens[before:]))
        if reason is None:
            reason = "length" if len(tokens) == max_new_tokens else "context"
        told = (None, None) if run.recorder is None else run.recorder.told(len(tokens))
        seconds = time.perf_counter() - begin
        return Generation(context, tokens, reason, steps, lengths, seconds, self.lanes, run.kept, *told)

    def steps(
        self,
        prompt: Sequence[int] | Tensor,
        max_new_tokens: int | None = None,
        sampling: Sampling = Sampling(),
        random: Random | None = None,
        reuse: bool = False,
        stop: StopRule | None = Stop(),
    ) -> Iterator[Step]:
        """Decode after `prompt`, a step at a time, until `max_new_tokens`, a stop rule or the end of the context.

        Arguments and errors are those of `generate`; the last step may go beyond `max_new_tokens` and the stop.
        """
        context = check_prompt(prompt, self.target)
        most = None if max_new_tokens is None else check_new_tokens(max_new_tokens)
        run, stop = self._run(context, most, sampling, random or Random(), reuse), rule_for(stop, self.target.ends)
        run.ends = ends_of(stop)
        tell_of_settings(self.target, sampling)
        return self._in_turns(run, stop)

    def _in_turns(self, run: Run, stop: StopRule | None) -> Iterator[Step]:
        """Take each step in a turn of its own: between two of them the caller may do anything."""
        tokens: list[int] = []
        self.compute(self._prefill(run))
        while len(run.context) < run.end:
            step = self.compute(self.step(run))
            yield step
            for token in step.tokens:
                tokens.append(token)
                if stop is not None and stop(tokens) is not None:
                    return

    def begin(self, prompt: Sequence[int] | Tensor) -> Asking[Run]:
        """Take in a prompt, for a text that is decoded step by step in a job of `side_by_side`."""
        run = self._run(check_prompt(prompt, self.target), None, Sampling(), Random(), False)
        yield from self._prefill(run)
        return run

    @at_every_rank
    def __call__(
        self,
        model: Any,
        input_ids: Tensor,
        stop_strings: str | list[str] | None = None,
        seed: int | None = None,
        **prepared: Any,
    ) -> Any:
        """Serve `model.generate(**inputs, custom_generate=decoder)`; see `opt_tree.integrations.hf_generate`.

        transformers hands over what this signature names, so `generate(..., seed=7)` reaches it.
        """
        door = importlib.import_module("opt_tree.integrations.hf_generate")  # it stands on this module
        return door.custom_generate(self, model, input_ids, stop_strings=stop_strings, seed=seed, **prepared)

    def bind(self, **options: Any) -> Callable:
        """Return a `custom_generate` with `tokenizer=`, `stop_strings=`, `streamer=` or `seed=` given beforehand.

        transformers passes a callable no tokenizer, which stop strings need.
        """
        return functools.partial(self, **options)

    def turn(self) -> ExitStack:
        """Wait until no other thread uses the target or the drafter, and keep them while this is open."""
        drafting = () if self.drafter is None else (self.drafter.bare, *self.drafter.models)
        stack = ExitStack()
        for turn in sorted({turn_of(shared) for shared in (self.target, *drafting)}, key=id):  # in one order for all
            stack.enter_context(turn)
        return stack

    def _run(
        self, context: list[int], max_new_tokens: int | None, sampling: Sampling, random: Random, reuse: bool
    ) -> Run:
        end = self.target.max_context
        if max_new_tokens is not None:
            end = min(end, len(context) + max_new_tokens)
        for judge in (self.verifier, *(known.verifier for known in self.policy.policies)):
            if judge is not None:
                check_temperature(judge, sampling.temperature)
        verifier = greedy if sampling.greedy else self.verifier
        require(bool, reuse=reuse)
        return Run(self.target, context, end, sampling, random, self.drafter, verifier, reuse)

    def _prefill(self, run: Run) -> Asking[None]:
        """Take in the prompt without its last token, which is the first root; of a text that goes on, what is new.

        One token is taken in anyway: drafters and policies read what the target says of the last one.
        """
        begin, prompt, target, drafter = time.perf_counter(), run.context, run.target, run.drafter
        shown = run.shown
        if target.ranks is not None and target.ranks.leading is None:
            raise ValueError(f"{target.name} is spread over processes, which decide together in generate() alone")
        if run.reuse:
            most = len(prompt) - 2
            run.kept = target.keep(prompt, most if drafter is None else min(most, drafter.keeps(shown)))
        else:
            target.reset()
        all_logits = drafter is not None and drafter.reads_logits
        output = (yield target.text(prompt[run.kept : -1], all_logits=all_logits)) if len(prompt) > 1 else None
        if drafter is not None:
            drafter.bare.generation += 1
            drafter.begin(shown, run.kept, output, run.sampling)
        self.policy.begin(shown, output)
        run.begun()
        run.prefill = time.perf_counter() - begin

    def step(self, run: Run) -> Asking[Step]:
        """Decode one step of a text: ask the policy for the one of this step, and let the policy learn from it."""
        run.check_alone()
        if run.drafter is not None:
            tell_of_end(run.target, run.drafter, len(run.context))
        before, run.laps = (run.draft_work, run.target.work), []
        run.lap()
        root, drafter = None, run.drafter
        if self.policy.reads_root and drafter is not None and run.layers > 0:
            root = yield from answer_of(drafter, drafter.root(run.shown))
        policy = self._choose(run.shown, root)
        judge = run.verify if policy.verifier is None or run.sampling.greedy else policy.verifier
        outcome = yield from decode_step(run, drafter, policy, judge, root)
        begin, drafted, verified, committed = run.laps
        drafting, scoring = run.draft_work - before[0], run.target.work - before[1]
        times = StepTimes(
            drafted - begin, verified - drafted, committed - verified, drafting.seconds, scoring.seconds, run.prefill
        )
        tree = outcome.tree
        if tree.draft_log_probs is not None:  # a step may be kept; at 128 thousand tokens these are 15 MB
            tree = dataclasses.replace(tree, draft_log_probs=None)
        step = Step(tree, outcome.path, outcome.tokens, policy, drafting.forwards, drafting.tokens, times)
        self.policy.observe(step, outcome)
        run.add(step.tokens)
        run.prefill = 0.0
        return step

    def _choose(self, context: list[int], root: LogProbs | None) -> TreePolicy:
        policy = self.policy.choose(context, root)
        if policy not in self.policy.policies:
            raise ValueError(f"{type(self.policy).__name__} chose a policy that is not one of its own: {policy}")
        return policy
