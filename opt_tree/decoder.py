"""The loop, step after step: `generate` computes the forwards that `decode.py` asks for, one by one."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any, TypeVar

import torch
from torch import Tensor

from opt_tree.decode import Run, next_step, prefill
from opt_tree.drafter import Drafter
from opt_tree.errors import require
from opt_tree.generation import Generation, Step
from opt_tree.policy import TreePolicy, check_grows
from opt_tree.request import (
    StopRule,
    StopTokens,
    check_new_tokens,
    check_others,
    check_prompt,
    check_recorder,
    rule_for,
)
from opt_tree.sampling import Random, Temperature
from opt_tree.target import Asking, Target, Turns, run_alone
from opt_tree.verify import Verifier, check, check_temperature, greedy, match

T = TypeVar("T")


class Decoder:
    """A target, a drafter, a tree policy and a verifier, checked once to belong together.

    Arguments:
        target: whose distribution is reproduced.
        drafter: what proposes tokens; None for plain decoding.
        policy: the tree policy of every step, or a controller, which chooses one for each; all that it may choose are
            checked.
        verifier: who judges above temperature 0. At temperature 0 it is `greedy`.
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
            raise TypeError(f"{type(target).__name__} is no target: wrap(model) makes one of a model")
        if drafter is not None and not isinstance(drafter, Drafter):
            raise TypeError(f"{type(drafter).__name__} is no drafter: load_drafter(spec, target) loads one")
        if not isinstance(policy, TreePolicy):
            raise TypeError(f"{policy!r} is no TreePolicy, such as OptTree(nodes=16)")
        if not isinstance(verifier, Verifier):
            raise TypeError(f"{verifier!r} is no verifier: match is one, docs/methods.md has more")
        if drafter is not None and any(model is target for model in drafter.models):
            raise ValueError(
                f"{target.name} is the target and drafts, too, and one object has one cache: wrap the model twice"
            )
        require(bool, lossy=lossy)
        check_policies(policy, drafter, verifier, lossy)
        self.target, self.drafter, self.policy, self.verifier = target, drafter, policy, verifier
        self.lanes = 1
        watched = {*policy.features, *(drafter.features if drafter is not None else ())}
        if watched:
            target.watch(tuple(sorted(watched)))

    def __repr__(self) -> str:
        parts = f"{self.target!r}, {self.drafter!r}, {self.policy!r:.90}, {self.verifier.__name__}"
        return f"<{type(self).__name__}: {parts}>"

    def generate(
        self,
        prompt: Sequence[int] | Tensor,
        max_new_tokens: int = 128,
        sampling: Temperature = Temperature(),
        stop: StopRule | None = StopTokens(),
        streamer: Any = None,
        seed: int = 0,
        reuse: bool = False,
        recorder: Any = None,
        **others: Any,
    ) -> Generation:
        """Generate after `prompt` until `max_new_tokens`, a stop rule or the end of the target's context.

        Arguments:
            prompt: token ids, a list or a tensor of one row.
            max_new_tokens: how many tokens at most, at least 1.
            sampling: temperature, and what a `Sampling` adds: top-k, top-p, processors; greedy by default.
            stop: asked after every token (see `Stop`). By default the target's own end tokens (`Target.ends`), which
                `Stop(strings=...)` keeps; None: never.
            streamer: one of transformers': it receives the prompt, then the tokens of each step.
            seed: the same one gives the same tokens; judged by `greedy` or `match`, whatever the tree.
            reuse: keep what the target holds of the text that it decoded last, as far as `prompt` begins like it
                (`Generation.reused` tokens), for the turns of a conversation. The text is the same, to rounding.
            recorder: keeps log-probabilities, such as `Recorder(5)`; for one text at a time. `begin(vocab)` is first,
                `add(logits, scores, path, tokens)` for every step, and `told(length)` returns `Generation.log_probs`
                and `top_log_probs` of the first `length` tokens.

        Raises ValueError for an empty prompt, a batch, a token outside the vocabulary or a prompt that leaves no room,
        for a temperature above 0 with the verifier `greedy`, and TypeError for an argument of another kind.
        """
        self.target.about_to_decode(sampling)
        asking = self.answer(prompt, max_new_tokens, sampling, stop, streamer, seed, reuse, recorder, **others)
        return self.led(lambda: self.compute(asking))

    def led(self, action: Callable[[], T]) -> T:
        """Act; where processes share a model, let the one that leads act and the others run its forwards with it."""
        ranks = next((model.ranks for model in self.models if getattr(model, "ranks", None) is not None), None)
        return action() if ranks is None else ranks.led(self.models, action)

    @property
    def models(self) -> tuple[Any, ...]:
        """What runs forwards: the target, and the drafter's models."""
        return (self.target, *(self.drafter.models if self.drafter is not None else ()))

    def compute(self, asking: Asking[T]) -> T:
        """Compute every forward that is asked for, one by one, in a turn of this thread; return what comes of it."""
        with self.locked(), torch.inference_mode():  # one mode for all: to enter and leave it in every step is dear
            return run_alone(asking)

    def answer(
        self,
        prompt: Sequence[int] | Tensor,
        max_new_tokens: int = 128,
        sampling: Temperature = Temperature(),
        stop: StopRule | None = StopTokens(),
        streamer: Any = None,
        seed: int = 0,
        reuse: bool = False,
        recorder: Any = None,
        **others: Any,
    ) -> Asking[Generation]:
        """Do what `generate` does, as a generator of forwards: what a job beside others yields from."""
        try:
            check_others(others)
            if streamer is not None and not callable(getattr(streamer, "put", None)):
                raise TypeError(f"streamer must be one of transformers', with put and end, got {streamer!r:.80}")
            check_recorder(recorder)
            most, rest = check_new_tokens(max_new_tokens), {"reuse": reuse, "recorder": recorder}
            run = self._run(prompt, most, sampling, stop, random=Random(seed), **rest)
            return (yield from self._answer(run, most, streamer))
        finally:  # whoever reads the stream in another thread would wait for ever
            if callable(getattr(streamer, "end", None)):
                streamer.end()

    def _answer(self, run: Run, max_new_tokens: int, streamer: Any) -> Asking[Generation]:
        begin, prompt, steps, lengths = time.perf_counter(), list(run.context), [], []
        if run.recorder is not None:
            run.recorder.begin(self.target.vocab)
        if streamer is not None:
            streamer.put(torch.tensor([prompt]))
        yield from prefill(run, self.policy)
        while run.goes_on:
            known = len(run.tokens)
            steps.append((yield from self.step(run)))
            lengths.append(len(run.tokens) - known)
            if streamer is not None:
                streamer.put(torch.tensor(run.tokens[known:]))
        full = "length" if len(run.tokens) == max_new_tokens else "context"
        told = (None, None) if run.recorder is None else run.recorder.told(len(run.tokens))
        seconds, reason = time.perf_counter() - begin, full if run.reason is None else run.reason
        return Generation(prompt, run.tokens, reason, steps, lengths, seconds, self.lanes, run.kept, *told)

    def steps(
        self,
        prompt: Sequence[int] | Tensor,
        max_new_tokens: int | None = None,
        sampling: Temperature = Temperature(),
        random: Random | None = None,
        reuse: bool = False,
        stop: StopRule | None = StopTokens(),
    ) -> Iterator[Step]:
        """Decode after `prompt`, a step at a time, until `max_new_tokens`, a stop rule or the end of the context.

        Arguments and errors are those of `generate`; the last step may go beyond `max_new_tokens` and the stop.
        """
        run = self._run(prompt, max_new_tokens, sampling, stop, random=random or Random(), reuse=reuse)
        self.target.about_to_decode(sampling)
        return self._in_turns(run)

    def _in_turns(self, run: Run) -> Iterator[Step]:
        """Take each step in a turn of its own: between two of them the caller may do anything."""
        self.compute(prefill(run, self.policy))
        while run.goes_on:
            yield self.compute(self.step(run))

    def step(self, run: Run) -> Asking[Step]:
        """Decode one step of a text that was taken in."""
        return next_step(run, self.policy)

    def __call__(self, *given: Any, **options: Any) -> Any:
        """Refuse to be what it was not made for: transformers would silently go on without what it cannot call."""
        raise TypeError("generate(custom_generate=custom_generate(decoder)) decodes with a Decoder, itself it is none")

    def locked(self) -> ExitStack:
        """Wait until no other thread uses the target or the drafter, and keep them while this is open."""
        shared = self.models if self.drafter is None else (*self.models, self.drafter.bare)
        found, stack = {vars(one).setdefault("_turns", Turns()) for one in shared}, ExitStack()
        for turns in sorted(found, key=id):  # in one order for all
            stack.enter_context(turns.lock)
        return stack

    def _run(self, prompt: Any, max_new_tokens: Any, sampling: Temperature, stop: Any, **rest: Any) -> Run:
        """Check what was asked for, and begin."""
        context, end = check_prompt(prompt, self.target), self.target.max_context
        if max_new_tokens is not None:
            end = min(end, len(context) + check_new_tokens(max_new_tokens))
        if not isinstance(sampling, Temperature):
            raise TypeError(f"sampling must be a Sampling, such as Sampling(temperature=0.7), got {sampling!r}")
        check_temperature(self.verifier, sampling.temperature)
        verifier = greedy if sampling.greedy else self.verifier
        require(bool, reuse=rest.get("reuse", False))
        rule = rule_for(stop, self.target.ends)
        return Run(self.target, self.drafter, verifier, sampling, context=context, end=end, stop=rule, **rest)


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
