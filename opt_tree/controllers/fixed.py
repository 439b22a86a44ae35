"""The same policy in every step: what a `Decoder` does with a bare policy."""

from jaxtyping import Float
from torch import Tensor

from opt_tree.controllers.base import Controller
from opt_tree.controllers.registry import Wanted, register
from opt_tree.core.children import Few
from opt_tree.core.errors import require
from opt_tree.policies import TreePolicy


class Fixed(Controller):
    """Always the same policy."""

    def __init__(self, policy: TreePolicy) -> None:
        require(TreePolicy, policy=policy)
        self.policies = (policy,)

    def choose(self, context: list[int], root: Float[Tensor, "1 vocab"] | Few | None) -> TreePolicy:
        return self.policies[0]


@register("fixed", about="the same tree in every step")
def _make(path: str, wanted: Wanted) -> Fixed:
    return Fixed(wanted.tree)
