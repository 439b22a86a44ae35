"""Controllers by name: `@register` stands in each one's file, above the function that makes it for a pair of models."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from opt_tree.methods.own_files import split_name
from opt_tree.methods.policies.costs import Costs
from opt_tree.methods.registry import Method, Registry
from opt_tree.models.causal_lm import CausalLM
from opt_tree.models.chain_lm import AnyLM
from opt_tree.models.checkpoints import CheckpointError
from opt_tree.models.named import resolve
from opt_tree.policy import OptTree, TreePolicy


@dataclass(frozen=True)
class ControllerRequest:
    """What a controller by name is made of."""

    target: AnyLM
    tree: OptTree
    """The largest tree it may choose: its nodes, its threshold, its layers."""
    costs: Callable[[], Costs]
    """What steps cost here. Asking may measure, which takes a minute."""
    seed: int = 0
    """Of what it draws; the text has a seed of its own."""

    @property
    def features(self) -> CausalLM:
        """The target, if its hidden states can be read; CheckpointError otherwise."""
        if not isinstance(self.target, CausalLM):
            raise CheckpointError(f"{self.target.name} is scored path by path: no controller can read its features")
        return self.target


Make = Callable[[str, ControllerRequest], TreePolicy]
"""From the folder that a spec names, empty for a controller that reads no files."""


def chooses(made: object) -> bool:
    """Whether it is a controller, or a class of them: a policy with a `choose` of its own."""
    kind = made if isinstance(made, type) else type(made)
    return issubclass(kind, TreePolicy) and kind.choose is not TreePolicy.choose


def _of_object(name: str, made: Any) -> Make:
    """A function as it is; a class without arguments; a controller that is made already as it is."""
    if chooses(made):
        return (lambda path, wanted: made()) if isinstance(made, type) else (lambda path, wanted: made)
    if isinstance(made, type) or not callable(made):
        raise ValueError(f"{name} is {made!r:.80}: no controller, nor a function (path, wanted) that makes one")
    return made


CONTROLLERS = Registry("controller", Method[Make], _of_object, __package__)
"""Every controller that a command can be told by name."""
register = CONTROLLERS.register


def parse_controller(spec: str) -> tuple[str, str]:
    """Read `NAME` or `NAME:PATH`. Raises ValueError for an unknown name, and a path that is missing or not wanted.

    The controller of a file of one's own, `FILE.py:NAME`, is given the path that follows it, if any.
    """
    name, path = CONTROLLERS.split(spec)
    if split_name(name):
        CONTROLLERS.named(name)
        return name, path
    reads = CONTROLLERS.named(name).part is not None
    if reads != bool(path):
        raise ValueError(f"controller {name} reads {f'a folder: {name}:PATH' if reads else 'no files'}, got {spec!r}")
    return name, path


def make_controller(spec: str, wanted: ControllerRequest) -> TreePolicy:
    """Make the controller of a spec: `auto`, `beta`, `predicted:demo`.

    Raises ValueError as `parse_controller` does, and CheckpointError for a folder that holds nothing for this target.
    """
    name, path = parse_controller(spec)
    method = CONTROLLERS.named(name)
    try:
        made = method.make(path if method.part is None else resolve(path, method.part), wanted)
    except TypeError as error:
        raise ValueError(f"{spec} cannot be made: {error}; name a function (path, wanted) that makes it") from error
    if not isinstance(made, TreePolicy):
        raise ValueError(f"{spec} is {made!r:.80}: no controller")
    return made
