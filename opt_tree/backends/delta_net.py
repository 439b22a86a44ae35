"""The gated delta rule of a tree's rows, in one forward.

A gated delta net (arXiv:2412.06464) adds u = beta (v - exp(g) S^T k) along k. From the committed state on, the u of a
tree's rows solve one triangular system in which a row meets its ancestors alone (TreeWY, arXiv:2608.20961).
"""

import torch
from jaxtyping import Float
from torch import Tensor

from opt_tree.backends.recurrent import RecurrentCache
from opt_tree.backends.recurrent_rows import Sums


def follow(
    cache: RecurrentCache,
    layer: int,
    query: Float[Tensor, "1 rows key_heads key_dim"],
    key: Float[Tensor, "1 rows key_heads key_dim"],
    value: Float[Tensor, "1 rows heads value_dim"],
    g: Float[Tensor, "1 rows heads"],
    beta: Float[Tensor, "1 rows heads"],
    use_qk_l2norm_in_kernel: bool = False,
    **kwargs: object,
) -> tuple[Float[Tensor, "1 rows heads value_dim"], None]:
    """The gated delta rule, each row along its own path: what the row reads of the state behind it.

    With c_i the product of exp(g) along i's path,
    u_i = beta_i (v_i - c_i S0^T k_i - sum over ancestors j of (c_i / c_j) (k_j . k_i) u_j).
    """
    exact = torch.promote_types(query.dtype, torch.float32)
    q, k, v = (rows[0].transpose(0, 1).to(exact) for rows in (query, key, value))
    q, k = (rows.repeat_interleave(len(v) // len(rows), 0) for rows in (q, k))  # one for every head of the values
    if use_qk_l2norm_in_kernel:
        q, k = (rows * torch.rsqrt(rows.square().sum(-1, keepdim=True) + 1e-6) for rows in (q, k))
    q = q * q.shape[-1] ** -0.5
    gate, share = (rows[0].transpose(0, 1).to(exact) for rows in (g, beta))
    own = cache.layer(layer, k.new_zeros(k.shape[0], k.shape[2], v.shape[2]))
    assert own.state is not None
    sees = cache.sees.to(q.device)
    own.rows = rows = Sums.of(own.rows, k, gate, sees)
    left, start = rows.left(sees), sees.shape[1] - sees.shape[0]
    overlap = share[..., None] * left * (k @ rows.keys.mT)
    known = share[..., None] * (v - rows.from_state(len(sees)) * (k @ own.state))
    if rows.updates is not None:
        known = known - overlap[..., :start] @ rows.updates
    # The diagonal is not read: it is taken for 1.
    rows.add(torch.linalg.solve_triangular(overlap[..., start:], known, upper=False, unitriangular=True))
    return rows.read(q, left, own.state).transpose(0, 1)[None].to(query.dtype), None
