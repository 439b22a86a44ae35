"""A decoder whose steps stay on the device: the loop of `Decoder`, with `TensorStep` where a step can be one.

Owns which steps those are, and what the loop gets of one: the same `Step`, and the same `Outcome` for the drafter.
Whatever a `TensorStep` does not carry takes the host's step, and `taken` says how often and why.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any, cast

import numpy as np
from jaxtyping import Int
from torch import Tensor

from opt_tree.backends.captured_step import CapturedStep
from opt_tree.backends.cuda_graphs import Captured
from opt_tree.backends.device_step import Coming, DeviceStep, StepStart
from opt_tree.backends.tensor_drafter import TensorDrafter
from opt_tree.backends.tensor_growth import Growth
from opt_tree.backends.tensor_pool import tree_as_told
from opt_tree.backends.windows import WithWindows
from opt_tree.cache import KVCache
from opt_tree.decode import Run, layers_left
from opt_tree.decoder import Decoder
from opt_tree.drafter import Drafter
from opt_tree.generation import Outcome, Step
from opt_tree.model import Model
from opt_tree.target import Asking
from opt_tree.tree import Tree, send
from opt_tree.verify import greedy, match

DEVICE = "device"
"""In `DeviceDecoder.taken`: steps that stayed on the device."""
_NOTHING = np.zeros(0, dtype=np.int64)


class DeviceDecoder(Decoder):
    """A decoder whose steps are functions of tensors, read once each (`opt_tree.tools.on_device` makes one).

    Texts, trees and acceptance lengths are those of the decoder that it was made of, to rounding. Every layer has as
    many rows as it may have, whatever the numbers, and every tree as many layers, or one more than the host's where a
    stop saves forwards (`TensorStep.looks`): `draft_forwards` and `draft_tokens` of a `Step` count these. Of its times,
    `draft` is what was launched meanwhile, looks at flags and the next step included, `verify` the wait for the
    verdict.
    """

    def __init__(
        self,
        decoder: Decoder,
        tensors: Callable[[Any], TensorDrafter | None],
        growth: Growth | None,
        why: str | None = None,
    ) -> None:
        """`tensors`: from its drafter to how that answers on tensors. `growth`: how the policy's trees grow there.

        `why`: a reason to take the host's steps instead.
        """
        parts = decoder.target, decoder.drafter, decoder.policy, decoder.verifier
        super().__init__(*parts, lossy=True)  # whoever made the decoder said so, or it is not
        self.growth, self._of, self._why = growth, tensors, why
        self.taken: Counter[str] = Counter()
        """Of the last text: how many steps stayed on the device, and how many did not, by the reason."""
        self.ahead = 0
        """Of the last text: how many steps were on their way before the one before them was read."""
        self._coming: tuple[Run, DeviceStep, list[int], Coming] | None = None
        """The step on its way, of which text, and what `_stamp` was."""
        self._noise: tuple[Run, int, Int[np.ndarray, " depths"]] | None = None
        """Starts of the noise behind so many tokens of a text."""
        self._refusal: str | None = None
        """`why` at the beginning of the text."""
        self._made: tuple[Drafter | None, TensorDrafter | None] | None = None
        """A drafter, and how it answers."""
        self._step: DeviceStep | None = None
        self._ends: tuple[Any, Tensor | None] = (), None

    def __repr__(self) -> str:
        where = self.why or f"on {self.target.device}"
        return f"{super().__repr__()[:-1]}, steps: {where}>"

    @property
    def why(self) -> str | None:
        """Why no step can stay on the device; None: they can, as far as the parts of the decoder tell."""
        return self._why or _why_not(self.target, self._tensors())

    def _tensors(self) -> TensorDrafter | None:
        """How the drafter answers that there is now: a copy of a decoder has another."""
        if self._made is None or self._made[0] is not self.drafter:
            self._made = self.drafter, self._of(self.drafter)
        return self._made[1]

    def step(self, run: Run) -> Asking[Step]:
        """Decode one step of a text, on the device if it can be."""
        if not run.laps:
            self.taken.clear()
            self._refusal, self.ahead, self._coming = self.why, 0, None
        layers = run.layers
        reason = self._reason(run) or ("no room to draft" if layers < 1 else None)
        self.taken[reason or DEVICE] += 1
        if reason is not None:
            return (yield from super().step(run))
        run.begin_step()
        tree, path, tokens = yield from self._decode(run, cast(Drafter, run.drafter), layers)
        run.lap()
        step = run.end_step(tree, path, tokens, self.policy)
        run.extend(tokens)
        return step

    def _reason(self, run: Run) -> str | None:
        """Why this step is the host's; None: it is not."""
        if self._refusal is not None:
            return self._refusal
        if getattr(run.sampling, "processors", ()):
            return "logits processors look at each row's history"
        if run.verify not in (greedy, match):
            return f"verifier {run.verify.__name__} judges on the host"
        return cast(TensorDrafter, self._tensors()).why_not(run.context)

    def _decode(self, run: Run, drafter: Drafter, layers: int) -> Asking[tuple[Tree, list[int], list[int]]]:
        """Emit the tokens of one step: `decode_step` on the device. The tree, the accepted path, the tokens.

        `layers`: those that there is room for.
        """
        step = self._tensor_step()
        limit = min(step.layers, layers)
        coming = self._on_its_way(run, step, limit)
        forward = step.drafter.lacks(run.context, step.catching_up)
        if forward is not None and (rows := len(forward.tokens)) > step.catching_up:
            # A text begins, or the host took steps.
            yield forward.part(0, rows - 1)
            forward = forward.part(rows - 1, rows)
        starts = _NOTHING if run.sampling.greedy else self._starts(run, 2 * (limit + 1))
        lacks = forward, run.context[-1], step.drafter.sent(run.context, step.layers, self.target.device)
        asked = StepStart(*lacks, limit, run.sampling, starts, self._ends_of(run))
        coming = step.begin(asked) if coming is None else coming
        step.drafter.launched()
        step.finish(coming)
        later = step.ahead(asked, coming) if self._goes_on(run, step, limit) else None
        run.lap()
        judged = step.end(asked, coming)
        run.lap()
        tree, path = judged.tree, judged.path
        tokens = [*tree.tokens[path[1:]].tolist(), judged.token]
        self._coming = None if later is None else (run, step, self._stamp(step, len(run.context) + len(tokens)), later)
        # The accepted nodes that were drafted below are the first rows behind the drafter's context.
        numbers = np.full(len(tree), -1)
        numbers[path] = np.where(tree.draft_rows[path] >= 0, np.arange(len(path)), -1)
        kept = tree_as_told(tree.tokens, tree.parents, tree.path_log_probs, numbers)
        outcome = Outcome(kept, path, tokens, judged.features, judged.logits)
        run.emitted(outcome, judged.scores)
        run.random.advance(len(tokens))
        drafter.accept(outcome)
        return tree, path, tokens

    def _goes_on(self, run: Run, step: DeviceStep, limit: int) -> bool:
        """Whether the step behind this one is known but for what this one leaves on the device.

        It has all layers, however long this one's path is, and nobody asks for numbers that it would overwrite.
        """
        length = len(run.context) + limit + 1
        return (
            limit == step.layers <= layers_left(run.drafter, length, run.end)
            and run.recorder is None
            and step.drafter.goes_on(length, limit, self.target.vocab)
        )

    def _on_its_way(self, run: Run, step: DeviceStep, limit: int) -> Coming | None:
        """The step to take, if it is on its way; one that is another is dropped, as its rows are behind the context."""
        known, self._coming = self._coming, None
        if known is None or known[0] is not run or known[1] is not step:
            return None
        if known[2] != self._stamp(step, len(run.context)):
            return None
        coming = known[3]
        if coming.shape.limit != limit or coming.shape.scale != step.drafter.scale or coming.held != step.held():
            return None
        self.ahead += 1
        return coming

    def _stamp(self, step: DeviceStep, length: int) -> list[int]:
        """The context's length, and each model's forwards: whoever runs one writes over a step on its way."""
        return [length, *(lm.work.forwards for lm in step.models)]

    def _starts(self, run: Run, count: int) -> Int[np.ndarray, " depths"]:
        """`Random.starts` of the next so many tokens, each made once."""
        length, noise = len(run.context), _NOTHING
        if self._noise is not None and self._noise[0] is run:
            noise = self._noise[2][length - self._noise[1] :]
        if len(noise) < count:
            noise = np.concatenate([noise, run.random.starts(np.arange(len(noise), count))])
        self._noise = run, length, noise
        return noise[:count]

    def __getstate__(self) -> dict[str, Any]:
        """Without what is of a text under way: a copy launches its own steps."""
        return {**vars(self), "_coming": None, "_noise": None}

    def _tensor_step(self) -> DeviceStep:
        """The step of the models that there are now: a copy of a decoder has others."""
        target, drafter = cast(Model, self.target), cast(TensorDrafter, self._tensors())
        if self._step is None or (self._step.target, self._step.drafter) != (target, drafter):
            assert self.growth is not None
            captured = all(lm is None or isinstance(lm.backend, Captured) for lm in (target, drafter.lm))
            kind = CapturedStep if captured and target.device.type == "cuda" else DeviceStep
            self._step = kind(target, drafter, self.growth, int(self.policy.max_depth))
        return self._step

    def _ends_of(self, run: Run) -> Tensor | None:
        """A mark for each token at which the text ends, on the device; None: it ends at none."""
        if self._ends[0] != run.ends:
            marks = np.zeros(self.target.vocab, dtype=bool)
            marks[[token for token in run.ends if 0 <= token < len(marks)]] = True
            self._ends = run.ends, send(marks, self.target.device) if marks.any() else None
        return self._ends[1]


def _why_not(target: Any, drafter: TensorDrafter | None) -> str | None:
    """Why the forwards of these cannot be those of a `TensorStep`; None: they can."""
    if not isinstance(target, WithWindows):
        return "the target is not one model with a cache"
    if drafter is None:
        return "its drafter drafts on the host"
    for lm in (target, *([] if drafter.lm is None else [drafter.lm])):
        if type(lm.cache) is not KVCache:
            return f"{lm.name} keeps its rows in a {type(lm.cache).__name__}"
        if (limit := getattr(lm, "key_limit", None)) is not None:
            return f"{lm.name} is causal for {limit} keys, and a step is padded to more"
        if {shape.device for shape in lm.cache.shapes} != {target.device}:
            return "the layers are on several devices"
    if target.ranks is not None:
        return f"{target.name} is spread over processes"
    return None
