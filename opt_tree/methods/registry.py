"""Methods by name: each is registered beside its class or function, and found because its file is in the folder.

A method in a file of one's own goes by FILE.py:NAME. Owns the mechanism only. Each family of methods has one
`Registry`, from which commands, tests and docs/methods.md take their lists. Nothing of a family is imported before
somebody asks its registry.
"""

import ast
import importlib
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from opt_tree.methods.own_files import object_of, split_name
from opt_tree.system.nearest import nearest

Made = TypeVar("Made")
Given = TypeVar("Given")
Entry = TypeVar("Entry", bound="Method[Any]")


@dataclass(frozen=True)
class Method(Generic[Made]):
    """A method of a family, and what a page says of it."""

    name: str
    make: Made
    """The method, or the function that makes it."""
    about: str
    """One line, which begins like a row of a table: lower case, no full stop."""
    paper: str = ""
    """The arXiv number; empty where there is no paper."""
    part: str | None = None
    """The folder of the embedded model that "demo" stands for; None for a method that reads no files."""


class Registry(Mapping[str, Entry]):
    """The methods of one family by name.

    OPTIONS = Registry("option", Method[type])

    @OPTIONS.register("sum", about="adds up")
    class Sum: ...
    """

    def __init__(
        self,
        family: str,
        entry: Callable[..., Entry],
        of_object: Callable[[str, Any], Any] = lambda name, made: made,
        package: str | None = None,
    ) -> None:
        """`family` is what a message calls one of them: "policy". `entry`: `Method`, or one with more fields.

        `of_object`: from FILE.py:NAME and the object of that name to what `register` would be given. `package`: the
        folder whose modules register theirs, at any depth; all are imported when the registry is first asked. None:
        whoever registers is imported by somebody else.
        """
        self.family, self._entry, self._of_object, self._package = family, entry, of_object, package
        self._methods: dict[str, Entry] = {}

    def __getitem__(self, name: str) -> Entry:
        return self._all[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)

    @property
    def _all(self) -> dict[str, Entry]:
        """Every method, sorted by name."""
        if self._package is not None:
            package, self._package = importlib.import_module(self._package), None
            for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
                importlib.import_module(module.name)
            self._methods = dict(sorted(self._methods.items()))
        return self._methods

    def register(
        self, name: str, about: str, paper: str = "", part: str | None = None, **more: Any
    ) -> Callable[[Given], Given]:
        """Return a decorator that lists what it decorates and leaves it as it is.

        Args: those of `Method`; `more` are the fields that a family adds to it.
        Raises ValueError for a name that another method has.
        """

        def add(made: Given) -> Given:
            method = self._entry(name, made, about, paper, part, **more)
            if (known := self._methods.get(name)) and _place(known.make) != _place(
                made
            ):  # a module may be loaded again
                raise ValueError(f"two {self.family} methods are called {name}: {_place(known.make)}, {_place(made)}")
            self._methods[name] = method
            return made

        return add

    def split(self, spec: str) -> tuple[str, str]:
        """Split a spec into a method's name, which may be FILE.py:NAME, and what follows behind a colon."""
        name, _, rest = spec.partition(":")
        return (name, rest) if name in self else split_name(spec) or (name, rest)

    def named(self, name: str) -> Entry:
        """Return the method of a name, of this registry or of a file of one's own: FILE.py:NAME.

        Raises ValueError with the names that there are.
        """
        if name in self:
            return self[name]
        if split_name(name) == (name, ""):
            return self._entry(name, self._of_object(name, object_of(name)), "of a file of one's own")
        if name.endswith(".py"):
            raise ValueError(f"{name} is a file: say which {self.family} of it is meant, {name}:NAME")
        near = nearest(name, self)
        meant = f"; did you mean {near}?" if near else ""
        raise ValueError(f"unknown {self.family} {name!r}; there are {', '.join(self)}, or FILE.py:NAME{meant}")


def listed(folder: Path) -> dict[str, str]:
    """Return what a folder's files register, sorted by name, each with what is said of it.

    The files are read and not imported: --help lists methods before anything is loaded.
    """
    found: dict[str, str] = {}
    for file in folder.rglob("*.py"):
        if "register(" not in (text := file.read_text(encoding="utf-8")):
            continue
        for call in ast.walk(ast.parse(text)):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "register":
                given = {keyword.arg: keyword.value for keyword in call.keywords}
                found[ast.literal_eval(call.args[0])] = ast.literal_eval(given["about"])
    return dict(sorted(found.items()))


def _place(made: Any) -> str:
    return f"{made.__module__}.{made.__qualname__}"
