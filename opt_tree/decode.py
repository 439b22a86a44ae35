"""THE loop: draft, score, verify, commit. Nothing else in the repository generates tokens with a target.

Owns the order of things and the clock; shapes are `lm.py`'s, rows are `cache.py`'s, integers are `pool.py`'s. Plain
decoding is this loop with an empty tree.
"""

import copy
import dataclasses
import functools
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from opt_tree import batch, hub
from opt_tree.arguments import require
from opt_tree.cache import inference
from opt_tree.children import Few, Reduced
from opt_tree.controllers import Controller, Fixed
from opt_tree.drafters import Drafter, DrafterAround
from opt_tree.led import together
from opt_tree.node_by_node import grow, looked_up
from opt_tree.policies import TreePolicy
from opt_tree.pool import CandidatePool, Frontier
from opt_tree.random import Random
from opt_tree.sampling import Sampling
from opt_tree.staging import take
from opt_tree.step import Outcome, Step, StepTimes
from opt_tree.stopping import StopRule
from opt_tree.target import Laws, Target, Work, turn_of
from opt_tree.tree import Tree, alone
from opt_tree.verifiers import Verifier, check, greedy, match

P = ParamSpec("P")
T = TypeVar("T")


def draft(
    drafter: Drafter | None,
    policy: TreePolicy,
    context: list[int],
    limit: int,
    sampling: Sampling = Sampling(),
    random: Random | None = None,
) -> Tree:
    """Grow one tree below the last token of the context, at most `limit` layers deep.

    Sampled children are drawn with `random`, from the drafter's distribution as `sampling` warps it.
    """
    if limit <= 0 or drafter is None:
        return alone(context[-1])
    below = looked_up(drafter, policy, context)
    if below is not None and not below.first:
        return grow(below, context, limit)
    children = policy.children
    pool = CandidatePool(context[-1], children, random)
    sampled = children.sampled
    answer = drafter.root(context) if sampled else drafter.root_laws(context)
    while True:
        pool.add(answer if isinstance(answer, Laws) else _drawn_from(answer, sampling))
        rows = policy.expand(pool) if pool.depth < limit else None
        if rows is None or not len(rows):
            return pool.tree(policy.select(pool))
        if below is not None and below.first == pool.depth:
            return grow(below, context, limit, pool)
        frontier = pool.frontier(rows)
        answer = drafter.expand(frontier) if sampled else drafter.expand_laws(frontier)


def _drawn_from(answer: Float[Tensor, "rows vocab"] | Few | Reduced, sampling: Sampling) -> Laws:
    """What sampled children are drawn from: a column for every token of the vocabulary, as the verifier needs it."""
    if isinstance(answer, Few):
        raise TypeError("children are drawn from a whole distribution; this drafter names a few tokens only")
    return Laws(sampling.warp(answer.whole() if isinstance(answer, Reduced) else answer))


def at_every_rank(method: Callable[Concatenate["Decoder", P], T]) -> Callable[Concatenate["Decoder", P], T]:
    """A method of a decoder that rank 0 runs for all, where the models are spread over processes (`opt_tree.led`)."""

    @functools.wraps(method)
    def call(self: "Decoder", *args: P.args, **options: P.kwargs) -> T:
        models = (self.target, *(self.drafter.models if self.drafter is not None else ()))
        return together(models, lambda: method(self, *args, **options))

    return call


@dataclass(frozen=True)
class Generation:
    """A finished generation: the new tokens, why it ended, and every step of it."""

    prompt: list[int]
    tokens: list[int]
    finish_reason: str
    """"length" (max_new_tokens), "context" (the model's context is full), or what the stop rule said."""
    steps: list[Step] = field(repr=False)
    accept_lengths: list[int]
    """Tokens emitted by each step, accepted + 1, the last step trimmed where the generation stopped."""
    seconds: float
    """Wall time of everything, prefill included."""
    lanes: int = 1
    """How many sequences were decoded side by side. Above 1 all times are of the batch: others' work is in them."""
    reused: int = 0
    """Tokens of the prompt that the target did not take in, as its cache held them already (`reuse=True`)."""

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens a step (the literature's MAL or tau): mean of accepted + 1; 1.0 for plain decoding."""
        return sum(self.accept_lengths) / max(len(self.accept_lengths), 1)

    @property
    def expected_lengths(self) -> list[float]:
        """E(A) + 1 of each step: what the drafter led to expect of `accept_lengths`."""
        return [step.expected_accepted + 1 for step in self.steps]

    @property
    def prefill_seconds(self) -> float:
        return self.steps[0].times.prefill if self.steps else 0.0

    @property
    def tokens_per_second(self) -> float:
        """New tokens over wall time, prefill included."""
        return len(self.tokens) / self.seconds

    def _repr_html_(self) -> str:
        from opt_tree.display.notebook import rich  # notebooks ask for it; whoever decodes needs no display

        return rich(self)


def layers_left(target: Target, drafter: Drafter | None, length: int, end: int) -> int:
    """How many layers of draft a context of `length` tokens that may grow to `end` has room for, also in the models."""
    models = [target] if drafter is None else [target, *drafter.models]
    room = min(end - length - 1, *(model.room(length - 1) for model in models))
    return room if drafter is None else min(room, drafter.max_context - length)


@dataclass
class _Run:
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

    @property
    def layers(self) -> int:
        """How many layers of draft there is room for."""
        return layers_left(self.target, self.drafter, len(self.context), self.end)

    @property
    def draft_work(self) -> Work:
        return Work() if self.drafter is None else self.drafter.work


class Decoder:
    """A target, a drafter, a tree policy and a verifier, checked once to belong together.

    A `Controller` in place of the policy chooses one for every step; all that it may choose are checked. At temperature
    0 the verifier is `greedy`; `verifier` judges above it, and one that does not keep the target's distribution does so
    only where the caller says `lossy=True`. A target serves one generation at a time: beginning another
    one on the same target ends the first. Threads that call `generate` take turns; to decode at once, give each a copy.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        policy: TreePolicy | Controller,
        verifier: Verifier = match,
        lossy: bool = False,
    ) -> None:
        if not isinstance(target, Target):
            raise TypeError(f"{type(target).__name__} is no target: opt_tree.wrap(model) makes one of a model")
        if drafter is not None and not isinstance(drafter, Drafter):
            raise TypeError(f"{type(drafter).__name__} is no drafter: opt_tree.load_drafter(spec, target) loads one")
        if isinstance(policy, type) or not isinstance(policy, (Controller, TreePolicy)):
            raise TypeError(f"{policy!r} is neither a tree policy, such as OptTree(nodes=16), nor a controller")
        if not isinstance(verifier, Verifier):
            raise TypeError(f"{verifier!r} is no verifier: opt_tree.match is one, opt_tree.verifiers has more")
        require(bool, lossy=lossy)
        self.controller = policy if isinstance(policy, Controller) else Fixed(policy)
        for known in self.controller.policies:
            if known.max_depth == 0:
                continue  # without children any verifier is exact
            for judge in (greedy, verifier, *self.controller.verifiers):
                check(judge, known.children, lossy)
            if drafter is None:
                raise TypeError(f"{type(known).__name__} needs a drafter")
            if drafter is not None and drafter.sparse and known.children.sampled:
                raise TypeError(
                    f"{type(drafter).__name__} names a few tokens of each node only; {type(known).__name__} draws its "
                    f"children ({type(known.children).__name__}), which takes a whole distribution: use TopK children"
                )
        self.target, self.drafter, self.verifier = target, drafter, verifier
        self.lanes = 1
        watched = {*self.controller.features, *(drafter.features if drafter is not None else ())}
        if watched:
            target.watch(tuple(sorted(watched)))

    def steps(
        self,
        prompt: Sequence[int] | Tensor,
        max_new_tokens: int | None = None,
        sampling: Sampling = Sampling(),
        random: Random | None = None,
        reuse: bool = False,
    ) -> Iterator[Step]:
        """Decode after `prompt`, a step at a time, until `max_new_tokens` or the target's context is full.

        `reuse`: see `generate`.
        Raises ValueError for an empty prompt, a batch, a token outside the vocabulary or a prompt that leaves no room.
        """
        context = check_prompt(prompt, self.target)
        return self._in_turn(self._steps(self._run(context, max_new_tokens, sampling, random or Random(), reuse)))

    def _in_turn(self, steps: Iterator[Step]) -> Iterator[Step]:
        """Take each step in a turn of its own: between two of them the caller may do anything."""
        while True:
            with self.turn():
                step = next(steps, None)
            if step is None:
                return
            yield step

    def turn(self) -> ExitStack:
        """Wait until no other thread uses the target or the drafter, and keep them while this is open."""
        drafting = () if self.drafter is None else (self.drafter.bare, *self.drafter.models)
        stack = ExitStack()
        for turn in sorted({turn_of(shared) for shared in (self.target, *drafting)}, key=id):  # in one order for all
            stack.enter_context(turn)
        return stack

    def _run(
        self, context: list[int], max_new_tokens: int | None, sampling: Sampling, random: Random, reuse: bool
    ) -> _Run:
        end = self.target.max_context
        if max_new_tokens is not None:
            end = min(end, len(context) + max_new_tokens)
        drafter = self.drafter.at_temperature(sampling.temperature) if self.drafter else None
        verifier = greedy if sampling.greedy else self.verifier
        return _Run(self.target, context, end, sampling, random, drafter, verifier, reuse)

    def _steps(self, run: _Run) -> Iterator[Step]:
        """The steps of a generation, for whoever has the turn."""
        target, drafter, context, end = run.target, run.drafter, run.context, run.end
        if target.ranks is not None and target.ranks.leading is None:
            raise ValueError(f"{target.name} is spread over processes, which decide together in generate() alone")
        self._prefill(run)
        generation, own = target.generation, drafter.bare.generation if drafter else 0
        while len(context) < end:
            if target.generation != generation:
                raise RuntimeError("another generation began on the same target; wrap the model twice for two")
            if drafter is not None and drafter.bare.generation != own:
                raise RuntimeError("another generation began with the same drafter; make two of it to interleave")
            step = self._step(run)
            context.extend(step.tokens)
            run.prefill = 0.0
            yield step

    @torch.inference_mode()
    def _prefill(self, run: _Run) -> None:
        """Take in the prompt without its last token, which is the first root; of a text that goes on, what is new.

        One token is taken in anyway: drafters and controllers read what the target says of the last one.
        """
        begin, prompt, drafter = time.perf_counter(), run.context, run.drafter
        if run.reuse:
            most = len(prompt) - 2
            run.kept = self.target.keep(prompt, most if drafter is None else min(most, drafter.holds(prompt)))
        else:
            self.target.reset()
        all_logits = drafter is not None and drafter.logits
        output = self.target.append(prompt[run.kept : -1], all_logits) if len(prompt) > 1 else None
        if drafter is not None:
            drafter.bare.generation += 1
            if run.kept and output is not None:
                drafter.resume(prompt, run.kept, output)
            else:
                drafter.reset(prompt, output)
        self.controller.reset(prompt, output)
        run.prefill = time.perf_counter() - begin

    @inference
    def _step(self, run: _Run) -> Step:
        """Choose a policy, draft, score, verify, commit; then let drafter and controller learn from it."""
        target, drafter, layers = self.target, run.drafter, run.layers
        begin, before = time.perf_counter(), (run.draft_work, target.work)
        root = None
        if self.controller.reads_root and drafter is not None and layers > 0:
            root = drafter.root(run.context)
            drafter = _RootAsked(drafter, root)
        policy = self._choose(run.context, root)
        tree = draft(drafter, policy, run.context, min(policy.max_depth, layers), run.sampling, run.random)
        drafted = time.perf_counter()
        output = target.score(tree)
        verdict = self._judge(run)(tree, run.sampling.processed(output.logits, tree, run.context), run.random)
        verified = time.perf_counter()
        drafted_tokens = tree.tokens.tolist()
        tokens = [*(drafted_tokens[row] for row in verdict.path[1:]), verdict.token]
        outcome = Outcome(tree, verdict.path, tokens, _of_path(output.features, verdict.path), output.logits)
        target.commit(verdict.path)
        run.random.advance(len(tokens))
        if run.drafter is not None:
            run.drafter.observe(outcome)
        committed = time.perf_counter()
        drafting, scoring = run.draft_work - before[0], target.work - before[1]
        times = StepTimes(
            drafted - begin, verified - drafted, committed - verified, drafting.seconds, scoring.seconds, run.prefill
        )
        if tree.draft_log_probs is not None:  # a step may be kept; at 128 thousand tokens these are 15 MB
            tree = dataclasses.replace(tree, draft_log_probs=None)
        step = Step(tree, verdict.path, tokens, policy, drafting.forwards, drafting.tokens, times)
        self.controller.observe(step, outcome)
        return step

    def _judge(self, run: _Run) -> Verifier:
        """The verifier of a step that was chosen for."""
        own = None if run.sampling.greedy else self.controller.verifier
        if own is not None and own not in self.controller.verifiers:
            raise ValueError(
                f"{type(self.controller).__name__} chose a verifier that is not one of its own: {own.__name__}"
            )
        return own or run.verify

    def _choose(self, context: list[int], root: Float[Tensor, "1 vocab"] | Few | Reduced | None) -> TreePolicy:
        policy = self.controller.choose(context, root.whole() if isinstance(root, Reduced) else root)
        if policy not in self.controller.policies:
            raise ValueError(f"{type(self.controller).__name__} chose a policy that is not one of its own: {policy}")
        return policy

    @at_every_rank
    def generate(
        self,
        prompt: Sequence[int] | Tensor,
        max_new_tokens: int = 128,
        sampling: Sampling = Sampling(),
        stop: StopRule | None = None,
        streamer: Any = None,
        seed: int = 0,
        reuse: bool = False,
    ) -> Generation:
        """Generate at most `max_new_tokens` tokens after `prompt` (token ids, a list or a tensor of one row).

        `stop` is asked after every token (see `Stop`); a transformers streamer receives the prompt, then each step's
        tokens. The same seed gives the same tokens; judged by `greedy` or `match`, whatever the tree. `reuse`: of the
        text that this target decoded last, what `prompt` begins with is not taken in anew (`Generation.reused` says how
        much that was): for the turns of a conversation. The text is the same, to rounding.
        """
        try:
            require(Real, max_new_tokens=max_new_tokens)
            if max_new_tokens < 1 or not float(max_new_tokens).is_integer():
                raise ValueError(f"max_new_tokens must be at least 1, got {max_new_tokens}: whole tokens")
            if not isinstance(sampling, Sampling):
                raise TypeError(f"sampling must be a Sampling, such as Sampling(temperature=0.7), got {sampling!r}")
            if stop is not None and not callable(stop):
                raise TypeError(f"stop must be a rule, such as Stop(strings=..., tokenizer=...), got {stop!r}")
            if streamer is not None and not callable(getattr(streamer, "put", None)):
                raise TypeError(f"streamer must be one of transformers', with put and end, got {streamer!r:.80}")
            context = check_prompt(prompt, self.target)
            with self.turn():
                run = self._run(list(context), max_new_tokens, sampling, Random(seed), reuse)
                return self._generate(run, max_new_tokens, stop, streamer)
        finally:  # whoever reads the stream in another thread would wait for ever
            if callable(getattr(streamer, "end", None)):
                streamer.end()

    @torch.inference_mode()
    def _generate(self, run: _Run, max_new_tokens: int, stop: StopRule | None, streamer: Any) -> Generation:
        # Under one mode as a whole: to enter and leave it in every step costs more than it looks.
        begin, context = time.perf_counter(), list(run.context)
        if streamer is not None:
            streamer.put(torch.tensor([context]))
        tokens: list[int] = []
        steps, lengths, reason = [], [], None
        for step in self._steps(run):
            before = len(tokens)
            for token in step.tokens:
                tokens.append(token)
                reason = stop(tokens) if stop is not None else None
                if reason is not None:
                    break
            steps.append(step)
            lengths.append(len(tokens) - before)
            if streamer is not None:
                streamer.put(torch.tensor(tokens[before:]))
            if reason is not None:
                break
        if reason is None:
            reason = "length" if len(tokens) == max_new_tokens else "context"
        seconds = time.perf_counter() - begin
        return Generation(context, tokens, reason, steps, lengths, seconds, self.lanes, run.kept)

    @at_every_rank
    def generate_batch(
        self,
        prompts: Sequence[Sequence[int] | Tensor],
        width: int = 8,
        max_new_tokens: int = 128,
        sampling: Sampling = Sampling(),
        stop: StopRule | Sequence[StopRule | None] | None = None,
        seed: int | Sequence[int] = 0,
    ) -> list[Generation]:
        """Generate after each prompt what `generate` would have, `width` of them side by side: their forwards are one.

        `stop` and `seed` are one for all prompts, or a list with one for each. Every prompt is checked before anything
        is decoded. An error in one ends all; its note says which prompt it was. See `side_by_side` for the rest.
        """
        require((Sequence, Tensor, np.ndarray), prompts=prompts)
        rules = list(stop) if isinstance(stop, Sequence) else [stop] * len(prompts)
        seeds = list(seed) if isinstance(seed, Sequence) else [seed] * len(prompts)
        if not len(prompts) == len(rules) == len(seeds):
            raise ValueError(f"{len(prompts)} prompts, but {len(rules)} stop rules and {len(seeds)} seeds")
        jobs = []
        for number, (prompt, rule, own) in enumerate(zip(prompts, rules, seeds, strict=True)):
            try:
                options = (check_prompt(prompt, self.target), max_new_tokens, sampling, rule, None, own)
            except ValueError as error:
                raise ValueError(f"prompt {number} of the batch: {error}") from None
            jobs.append(lambda decoder, options=options: decoder.generate(*options))
        found = dict(self.side_by_side(jobs, width))
        return [found[number] for number in range(len(jobs))]

    def side_by_side(self, jobs: Iterable[Callable[["Decoder"], T]], width: int = 8) -> Iterator[tuple[int, T]]:
        """Run jobs, `width` at a time, each with a decoder of its own; yield each one's place and result as it ends.

        A job is a function of a decoder, which may generate as often as it likes. Forwards of all jobs are packed into
        one; each has a context, a drafter and a controller of its own, copied from this decoder's, and what they learn
        ends with this call. Where the models do not take several sequences, the jobs run one after the other, and a
        warning says why. The times of a generation then have the others' work in them: see `Generation.lanes`.
        """
        require(Integral, width=width)
        if width < 1:
            raise ValueError(f"width must be at least 1, got {width}")
        models = (self.target, *(self.drafter.models if self.drafter is not None else ()))
        alone = self.drafter.alone if self.drafter is not None else None
        decoders, why = [], batch.why_alone(models) or alone
        if width > 1 and why is None:
            memos, shared = batch.lanes_of(models, width), self.controller.in_lanes(width)
            decoders = [self._copied(memo, shared, width) for memo in memos]
            why = batch.why_not_copied(memos[0])
        if width == 1 or why is not None:
            if width > 1:
                warnings.warn(f"one sequence after the other: {why}", stacklevel=2)
            for place, job in enumerate(jobs):
                yield place, job(self)
            return
        bound = ((lambda lane, job=job: job(decoders[lane])) for job in jobs)
        yield from hub.side_by_side(bound, width)

    def _copied(self, memo: dict[int, Any], shared: Controller | None, lanes: int) -> "Decoder":
        """The same decoder for one lane, with the controller that the lanes share, if they do."""
        twin = copy.copy(self)
        twin.target, twin.drafter = copy.deepcopy((self.target, self.drafter), memo)
        twin.controller = copy.deepcopy(self.controller, memo) if shared is None else shared
        twin.lanes = lanes
        return twin

    @at_every_rank
    def __call__(
        self,
        model: Any,
        input_ids: Tensor,
        stop_strings: str | list[str] | None = None,
        seed: int | None = None,
        **prepared: Any,
    ) -> Any:
        """Serve `model.generate(**inputs, custom_generate=decoder)`; see `opt_tree.hf`.

        transformers hands over what this signature names, so `generate(..., seed=7)` reaches it.
        """
        from opt_tree.hf import custom_generate  # the door imports the loop, so the loop opens it late

        return custom_generate(self, model, input_ids, stop_strings=stop_strings, seed=seed, **prepared)

    def bind(self, **options: Any) -> Callable:
        """Return a `custom_generate` with `tokenizer=`, `stop_strings=`, `streamer=` or `seed=` given beforehand.

        transformers passes a callable no tokenizer, which stop strings need.
        """
        return functools.partial(self, **options)


class _RootAsked(DrafterAround):
    """A drafter whose answer for the root is known already."""

    def __init__(self, drafter: Drafter, root: Float[Tensor, "1 vocab"] | Few | Reduced) -> None:
        super().__init__(drafter)
        self._root = root

    def root(self, context: list[int]) -> Float[Tensor, "1 vocab"] | Few | Reduced:
        return self._root

    def expand_laws(self, frontier: Frontier, scale: float = 1.0) -> Laws:
        return self.drafter.expand_laws(frontier, scale)


def _of_path(
    features: Mapping[int, Float[Tensor, "rows hidden"]], path: list[int]
) -> Mapping[int, Float[Tensor, "path hidden"]]:
    """Copy the features of a path's rows, so that they outlive the next forward."""
    if not features:
        return features
    return {layer: take(states, path) for layer, states in features.items()}


def check_prompt(prompt: Any, target: Target) -> list[int]:
    """Return the prompt as a fresh list of token ids, or say in one line what is wrong with it."""
    require(Iterable, prompt=prompt)
    ids = prompt.tolist() if isinstance(prompt, (Tensor, np.ndarray)) else list(prompt)
    if ids and isinstance(ids[0], (list, tuple)):
        if len(ids) > 1:
            raise ValueError(
                f"a batch of {len(ids)} prompts: trees of different shapes do not batch; decode one prompt at a time, "
                "or split the prompts over processes"
            )
        ids = list(ids[0])
    if not ids:
        raise ValueError("the prompt is empty: there is no token to continue from")
    if not all(isinstance(token, (int, np.integer)) for token in ids):
        raise ValueError("the prompt must be token ids; run the tokenizer on text first")
    if len(ids) >= target.max_context:
        raise ValueError(f"the prompt has {len(ids)} tokens, which leaves no room in {target.max_context} of context")
    if min(ids) < 0 or max(ids) >= target.vocab:
        raise ValueError(f"token {max(ids) if min(ids) >= 0 else min(ids)} is outside the vocabulary of {target.vocab}")
    return [int(token) for token in ids]
