"""A causal LM over one text: which rows are run, where they go in the cache, and which of them stay.

Owns shapes: it turns tokens, positions and visibility into the tensors of a forward, which a backend computes.
"""

from collections.abc import Generator
from typing import Any, cast

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from opt_tree.backend import Backend, Inputs, Mask
from opt_tree.cache import KVCache
from opt_tree.masks import tree_mask
from opt_tree.target import Drafted, Forward, Output, Target, Work, run_alone, shared
from opt_tree.tree import send

PREFILL = 512
"""Rows of a text that are run at once: a mask has a number for each pair of row and key."""


class Model(Target):
    """One network with the rows of one text: the context, and rows behind it, pending until `commit` keeps some."""

    drafted: Drafted | None = None
    """What a drafter reads of its logits, where one runs it. Compiled forwards are made for that."""

    def __init__(self, network: Any, backend: Backend | None = None) -> None:
        self.model = network.eval()
        self.backend = Backend(network) if backend is None else backend
        config, weight = network.config.get_text_config(), cast(Tensor, network.get_input_embeddings().weight)
        self.name = network.config.name_or_path or type(network).__name__
        self.vocab = config.vocab_size
        # One mask serves every layer up to the end of the shortest window or chunk: no row sees less before.
        kinds = getattr(config, "layer_types", None) or ("sliding_attention", "chunked_attention")
        ends = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}
        windows = (getattr(config, ends[kind], None) or 1 << 30 for kind in kinds if kind in ends)
        self.max_context = min([getattr(config, "max_position_embeddings", None) or 1 << 30, *windows])
        self.device, self.dtype, self.hidden = weight.device, weight.dtype, weight.shape[1]
        self.cache: KVCache = self.backend.new_cache()
        self.pending: Int[np.ndarray, "2 rows"] = np.zeros((2, 0), dtype=np.int64)
        """Tokens and positions of the rows that were added to the context last and are not committed, in order."""
        self._tokens: list[int] = []
        """The context, a token a row; -1 where it was given as rows."""

    @property
    def length(self) -> int:  # type: ignore[override]
        """Committed rows."""
        return self.cache.length

    @property
    def work(self) -> Work:  # type: ignore[override]
        """What it has done so far. Seconds are by the backend's clock; a device's last forward is waited for."""
        return self.backend.meter.work

    @work.setter
    def work(self, work: Work) -> None:
        self.backend.meter.work = work

    @property
    def size(self) -> str:
        """Parameters and dtype, for a reader."""
        count = sum(weight.numel() for weight in self.model.parameters())
        return f"{count / 1e6:.1f} M parameters, {str(self.dtype).removeprefix('torch.')}"

    def watch(self, layers: tuple[int, ...]) -> None:
        """See `Target.watch`. Raises ValueError for a layer whose hidden states the backend does not return."""
        self.backend.watch(layers)

    def begin(self) -> bool:
        """Look at the network before a text; return whether it is what it was before the last one."""
        return self.backend.begin_text()

    def reset(self) -> None:
        """Forget the context."""
        self.begin()
        super().reset()
        self.cache.reset()
        self._tokens = []

    def keep(self, prompt: list[int], most: int) -> int:
        """See `Target.keep`."""
        length = min(shared(self._tokens, prompt), most, self.length)
        if length < 1 or not self.cache.can_cut(length) or not self.begin():  # begin: the rows are another network's
            return super().keep(prompt, most)
        self.generation += 1
        self.cut(length)
        return length

    def cut(self, length: int) -> None:
        """Forget every row from `length` on."""
        self.cache.truncate(length)
        del self._tokens[length:]

    def run(self, forward: Forward) -> Output:
        """Compute what was asked for, in parts where it is longer than what is run at once."""
        return run_alone(self.running(forward), lambda asked: self.backend.run(asked[0], self.cache, asked[1]))

    def running(self, forward: Forward) -> Generator[tuple[Inputs, int], Output, Output]:
        """Do what `run` does, as a generator of the inputs that a backend is to compute, and how many rows are real.

        A text, or a tree, comes behind the context: pending rows are dropped.
        """
        if forward.goes_on or forward.tree is not None:
            self.cache.truncate(self.length)
        rows = len(forward.tokens)
        if not rows:
            return Output(torch.zeros(0, self.vocab, dtype=self.dtype, device=self.device))
        most = min(self.backend.rows_at_once or rows, PREFILL if forward.goes_on else rows)
        if rows <= most:
            return self.finish(forward, (yield self.prepare(forward), rows))
        parts = []
        for first in range(0, rows, most):
            part = forward.part(first, first + most)
            output = self.finish(part, (yield self.prepare(part), len(part.tokens)))
            kept = {layer: states.clone() for layer, states in output.features.items()}
            parts.append(output._replace(logits=output.logits.clone(), features=kept))  # it lives until the next part
        states = {layer: torch.cat([one.features[layer] for one in parts]) for layer in parts[0].features}
        if forward.last_only:
            return parts[-1]._replace(features=states)
        return Output(torch.cat([one.logits for one in parts]), states)

    def prepare(self, forward: Forward) -> Inputs:
        """Open the cache for a forward and return its tensors: the one place where rows become a forward."""
        (rows, columns), features = forward.visible.shape, forward.features
        start = self.length + columns - rows
        padded, keys = self.backend.shape(rows, start)
        in_order = (padded, keys) == (rows, start + rows)
        # A pad row is token 0 at position 0, in a slot of its own behind all columns.
        table = np.zeros((3, padded), dtype=np.int64)
        np.copyto(table[:2, padded - rows :], [forward.tokens, forward.positions])  # which refuses floats
        table[2] = start + np.arange(rows, rows + padded) % padded
        numbers = send(table, self.device)[:, None]
        self.pending = np.concatenate([self.pending[:, : columns - rows], [forward.tokens, forward.positions]], 1)
        self.cache.open(rows, keys, None if in_order else numbers[2, 0], forward.visible)
        if features is not None:
            features = features if padded == rows else torch.constant_pad_nd(features, (0, 0, padded - rows, 0))
            features = features[None]
        masks = self.masks(tree_mask(forward.visible, self.length, padded, keys, self.device), numbers[1, 0])
        return Inputs(numbers, masks, features, forward.last_only, self.drafted)

    def finish(self, forward: Forward, output: Output) -> Output:
        """Take what is the forward's; commit rows that continue the context."""
        rows = len(forward.tokens)
        if forward.goes_on:
            self.commit(list(range(rows)))
        return output.of_text(rows, forward.last_only)

    def commit(self, path: list[int]) -> None:
        """Keep these pending rows (of a tree: a path, root first) as the next rows of the context; drop the others."""
        self.cache.commit(path)
        self._tokens += self.pending[0, path].tolist()

    def masks(self, full: Mask, positions: Int[Tensor, " padded"]) -> Mask | dict[str, Mask]:
        """What the layers are given, where their rows at these positions see `full`; by kind where kinds see less."""
        return full
