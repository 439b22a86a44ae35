"""THE loop: draft, score, verify, commit. Nothing else in the repository generates tokens with a target.

Owns the order of things and the clock; shapes are `lm.py`'s, rows are `cache.py`'s, integers are `pool.py`'s. Plain
decoding is this loop with an empty tree.
"""

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from opt_tree.children import Few
from opt_tree.drafters import Drafter
from opt_tree.lm import CausalLM
from opt_tree.policies import TreePolicy
from opt_tree.pool import CandidatePool
from opt_tree.probabilities import log_probs_of
from opt_tree.random import Random
from opt_tree.sampling import Sampling
from opt_tree.step import Step, StepTimes
from opt_tree.stopping import StopRule
from opt_tree.tree import Tree
from opt_tree.verifiers import Verifier, check, greedy, match


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
    children = policy.children
    pool = CandidatePool(context[-1], children, random)
    if limit <= 0 or drafter is None:
        return pool.tree(np.array([0]))  # the root alone: plain decoding
    scores = drafter.root(context)
    while True:
        if isinstance(scores, Few):
            pool.add(scores)
        else:
            pool.add(sampling.warp(scores) if children.sampled else log_probs_of(scores))
        rows = policy.expand(pool) if pool.depth < limit else None
        if rows is None or not len(rows):
            return pool.tree(policy.select(pool))
        scores = drafter.expand(pool.frontier(rows))


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

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens a step (the literature's MAL or tau): mean of accepted + 1; 1.0 for plain decoding."""
        return sum(self.accept_lengths) / max(len(self.accept_lengths), 1)

    @property
    def expected_lengths(self) -> list[float]:
        """E(A) + 1 of each step: what the drafter expected of `accept_lengths`."""
        return [step.expected_accepted + 1 for step in self.steps]

    @property
    def prefill_seconds(self) -> float:
        return self.steps[0].times.prefill if self.steps else 0.0

    @property
    def tokens_per_second(self) -> float:
        """New tokens over wall time, prefill included."""
        return len(self.tokens) / self.seconds


class Decoder:
    """A target, a drafter, a tree policy and a verifier, checked once to belong together.

    At temperature 0 the verifier is `greedy`; `verifier` judges above it, and one that does not keep the target's
    distribution does so only where the caller says `lossy=True`. Batch size 1. A target serves one generation at a
    time: beginning another one on the same `CausalLM` ends the first.
    """

    def __init__(
        self,
        target: CausalLM,
        drafter: Drafter | None,
        policy: TreePolicy,
        verifier: Verifier = match,
        lossy: bool = False,
    ) -> None:
        for judge in (greedy, verifier):
            check(judge, policy.children, lossy)
        if drafter is None and policy.max_depth > 0:
            raise TypeError(f"{type(policy).__name__} needs a drafter")
        self.target, self.drafter, self.policy, self.verifier = target, drafter, policy, verifier

    def steps(
        self,
        prompt: Sequence[int] | Tensor,
        max_new_tokens: int | None = None,
        sampling: Sampling = Sampling(),
        random: Random | None = None,
    ) -> Iterator[Step]:
        """Decode after `prompt`, a step at a time, until `max_new_tokens` or the target's context is full.

        Raises ValueError for an empty prompt, a batch, a token outside the vocabulary or a prompt that leaves no room.
        """
        context = check_prompt(prompt, self.target)
        return self._steps(context, max_new_tokens, sampling, random or Random())

    def _steps(
        self, context: list[int], max_new_tokens: int | None, sampling: Sampling, random: Random
    ) -> Iterator[Step]:
        target, policy = self.target, self.policy
        drafter = self.drafter.at_temperature(sampling.temperature) if self.drafter else None
        verify = greedy if sampling.greedy else self.verifier
        end = target.max_context if max_new_tokens is None else min(target.max_context, len(context) + max_new_tokens)
        clock = time.perf_counter()
        target.reset()
        epoch = target.cache.epoch
        output = target.append(context[:-1]) if len(context) > 1 else None
        if drafter is not None:
            drafter.reset(context, output)
        prefill = time.perf_counter() - clock
        while len(context) < end:
            if target.cache.epoch != epoch:
                raise RuntimeError("another generation began on the same target; wrap the model twice to interleave")
            limit = min(policy.max_depth, end - len(context) - 1)
            if drafter is not None:
                limit = min(limit, drafter.max_context - len(context))
            step = self._step(drafter, verify, context, limit, sampling, random, prefill)
            context.extend(step.tokens)
            prefill = 0.0
            yield step

    @torch.inference_mode()
    def _step(
        self,
        drafter: Drafter | None,
        verify: Verifier,
        context: list[int],
        limit: int,
        sampling: Sampling,
        random: Random,
        prefill: float,
    ) -> Step:
        """Draft at most `limit` layers, score, verify, commit."""
        target = self.target
        begin, counted = time.perf_counter(), _counters(target, drafter)
        tree = draft(drafter, self.policy, context, limit, sampling, random)
        drafted = time.perf_counter()
        output = target.score(tree)
        verdict = verify(tree, sampling.process(output.logits, tree, context), random)
        verified = time.perf_counter()
        tokens = [*(int(tree.tokens[row]) for row in verdict.path[1:]), verdict.token]
        features = None
        if output.features is not None:
            kept = torch.from_numpy(np.array(verdict.path))
            features = output.features.index_select(0, kept.to(output.features.device))
        target.commit(verdict.path)
        random.advance(len(tokens))
        forwards, drafts, draft_forward, target_forward = (
            now - then for now, then in zip(_counters(target, drafter), counted, strict=True)
        )
        step = Step(tree, verdict.path, tokens, features, int(forwards), int(drafts), _NO_TIMES)
        if drafter is not None:
            drafter.observe(step)
        times = StepTimes(
            drafted - begin, verified - drafted, time.perf_counter() - verified, draft_forward, target_forward, prefill
        )
        object.__setattr__(step, "times", times)
        return step

    def generate(
        self,
        prompt: Sequence[int] | Tensor,
        max_new_tokens: int = 128,
        sampling: Sampling = Sampling(),
        stop: StopRule | None = None,
        streamer: Any = None,
        seed: int = 0,
    ) -> Generation:
        """Generate at most `max_new_tokens` tokens after `prompt` (token ids, a list or a tensor of one row).

        `stop` is asked after every token (see `Stop`); a transformers streamer receives the prompt, then each step's
        tokens. The same seed gives the same tokens; judged by `greedy` or `match`, whatever the tree.
        """
        if max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1, got {max_new_tokens}")
        begin = time.perf_counter()
        context = check_prompt(prompt, self.target)
        if streamer is not None:
            streamer.put(torch.tensor([context]))
        tokens: list[int] = []
        steps, lengths, reason = [], [], None
        for step in self._steps(list(context), max_new_tokens, sampling, Random(seed)):
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
        if streamer is not None:
            streamer.end()
        if reason is None:
            reason = "length" if len(tokens) == max_new_tokens else "context"
        return Generation(context, tokens, reason, steps, lengths, time.perf_counter() - begin)

    def __call__(self, model: Any, input_ids: Tensor, **prepared: Any) -> Any:
        """Serve `model.generate(**inputs, custom_generate=decoder)`; see `opt_tree.hf`."""
        from opt_tree.hf import custom_generate  # the door imports the loop, so the loop opens it late

        return custom_generate(self, model, input_ids, **prepared)

    def bind(self, **options: Any) -> Callable:
        """Return a `custom_generate` with `streamer=`, `tokenizer=`, `stop_strings=` or `seed=` given beforehand.

        transformers passes a callable none of the first three.
        """
        return functools.partial(self, **options)


_NO_TIMES = StepTimes(0, 0, 0, 0, 0)


def _counters(target: CausalLM, drafter: Drafter | None) -> tuple[float, float, float, float]:
    """Draft forwards, draft tokens and the two models' bare seconds so far."""
    if drafter is None:
        return 0, 0, 0.0, target.forward_seconds
    return drafter.forwards, drafter.tokens, drafter.forward_seconds, target.forward_seconds


def check_prompt(prompt: Any, target: CausalLM) -> list[int]:
    """Return the prompt as a fresh list of token ids, or say in one line what is wrong with it."""
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
