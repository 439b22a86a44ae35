"""The state space of Mamba-2 layers over a tree's rows, in one forward.

A Mamba-2 layer (arXiv:2405.21060) adds dt x along B and reads along C; its state decays by exp(dt A). What a row adds
does not depend on the state, so there is nothing to solve.

In half precision sums in another order would be other bits than those of one row at a time. There the rows of a tree
are taken level by level, by the operations and the roundings of transformers' one-row form, so that every row has the
bits that it has in plain decoding; and a path is committed by taking its rows once more.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import softplus

from opt_tree.backends.recurrent import RecurrentCache
from opt_tree.backends.recurrent_rows import Levels, PendingRows, State, Sums

NO_LIMIT = (0.0, float("inf"))


@dataclass
class Steps:
    """Pending rows that are taken one after the other, as they are in the model's dtype."""

    x: Float[Tensor, "columns heads value_dim"]
    b: Float[Tensor, "columns heads key_dim"]
    c: Float[Tensor, "columns heads key_dim"]
    dt: Float[Tensor, "columns heads"]
    a: Float[Tensor, " heads"]

    def after(self, before: PendingRows | None) -> "Steps":
        """These rows behind the pending ones."""
        if before is None:
            return self
        assert isinstance(before, Steps)
        x, b, c, dt = (torch.cat((getattr(before, name), getattr(self, name))) for name in ("x", "b", "c", "dt"))
        return Steps(x, b, c, dt, self.a)

    def step(self, states: Float[Tensor, "rows heads value_dim key_dim"], rows: Tensor) -> Tensor:
        """Take each of these rows by the state behind its parent; return the states behind them."""
        dt = self.dt[rows][..., None, None]
        decay = (dt.float() * self.a[:, None, None]).exp()
        return states * decay + dt * self.b[rows][:, :, None] * self.x[rows][..., None]

    def read(self, states: Float[Tensor, "rows heads value_dim key_dim"], rows: Tensor) -> Tensor:
        """What each of these rows reads of the state behind it."""
        flat = states.to(self.c.dtype).flatten(0, 1)
        return torch.bmm(flat, self.c[rows].flatten(0, 1)[..., None]).view(states.shape[:3])

    def behind(self, state: State, path: Int[Tensor, " path"]) -> State:
        """See `PendingRows.behind`."""
        states = state.mT.contiguous()[None]
        for row in path.split(1):
            states = self.step(states, row)
        return states[0].mT.contiguous()


def scan(
    cache: RecurrentCache,
    layer: int,
    hidden_states: Float[Tensor, "1 rows heads value_dim"],
    dt: Float[Tensor, "1 rows heads"],
    A: Float[Tensor, " heads"],
    B: Float[Tensor, "1 rows groups key_dim"],
    C: Float[Tensor, "1 rows groups key_dim"],
    D: Float[Tensor, " heads"] | None = None,
    dt_bias: Float[Tensor, " heads"] | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = NO_LIMIT,
    **kwargs: object,
) -> tuple[Float[Tensor, "1 rows heads value_dim"], None]:
    """The state space, each row along its own path: what the row reads of the state behind it."""
    x, step = hidden_states[0], dt[0]
    step = step if dt_bias is None else step + dt_bias.to(step.dtype)
    step = softplus(step) if dt_softplus else step
    step = torch.cat((step[: cache.limited].clamp(*dt_limit), step[cache.limited :]))
    b, c = (rows[0].repeat_interleave(x.shape[1] // rows.shape[2], 1) for rows in (B, C))
    exact = torch.promote_types(x.dtype, torch.float32)
    own = cache.layer(layer, x.new_zeros(x.shape[1], b.shape[2], x.shape[2], dtype=exact))
    assert own.state is not None
    if cache.text or x.dtype == exact:
        x, b, c, step = (rows.to(exact) for rows in (x, b, c, step))
        sees, keys, gates = cache.sees.to(x.device), b.transpose(0, 1), (step * A.to(exact)).T
        own.rows = sums = Sums.of(own.rows, keys, gates, sees)
        sums.add((step[..., None] * x).transpose(0, 1))
        out = sums.read(c.transpose(0, 1), sums.left(sees), own.state).transpose(0, 1)
    else:
        own.rows = steps = Steps(x, b, c, step, A).after(own.rows)
        out = _level_by_level(steps, cache.levels, own.state)[-len(x) :]
    out = out if D is None else (out + x * D[:, None]).to(out.dtype)
    return out.contiguous()[None], None  # some layers view it


def _level_by_level(steps: Steps, levels: Levels, state: State) -> Float[Tensor, "columns heads value_dim"]:
    """What each row reads, the rows of a level at once: the states of one level alone are held."""
    states, found = state.mT.contiguous()[None], []
    on_device = (part.to(state.device).split(levels.sizes) for part in (levels.rows, levels.above))
    for rows, above in zip(*on_device, strict=True):
        states = steps.step(states[above], rows)
        found.append(steps.read(states, rows))
    return torch.cat(found)[levels.back.to(state.device)]
