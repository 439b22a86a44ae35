"""The token ids that a logits processor or a stopping criterion is shown: a text, and a node's path below it.

Owns that a text's ids are made a tensor once. Knows nothing of what is asked about them.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Int
from torch import Tensor


class History:
    """The ids of a text as a tensor that grows with it: a new token costs the same after 100 tokens and 100 thousand.

    `tokens` is the text, a list that is appended to and otherwise left alone.
    """

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens
        self._ids: Int[Tensor, " room"] = torch.empty(0, dtype=torch.long)
        self._known = 0

    def ids(self, device: torch.device, branch: Sequence[int] = ()) -> Int[Tensor, "1 length"]:
        """Return the ids of the text so far and of `branch` below it, on a device.

        They are a view: those of the branch are valid until the next call.
        """
        length = len(self.tokens)
        end = length + len(branch)
        if end > len(self._ids) or device != self._ids.device:
            known, self._ids = self._ids[: self._known], torch.empty(2 * end, dtype=torch.long, device=device)
            self._ids[: self._known] = known
        new = [*self.tokens[self._known :], *branch]
        if new:
            self._ids[self._known : end] = torch.tensor(new)
        self._known = length
        return self._ids[None, :end]
