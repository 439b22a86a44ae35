"""Methods by name: what registers is found, what clashes is refused, and every method says what it is."""

import importlib
import pkgutil
import re
import sys
import types
from pathlib import Path

import pytest

import opt_tree.methods.verifiers
from opt_tree.methods.controllers.registry import CONTROLLERS
from opt_tree.methods.drafters.registry import KINDS
from opt_tree.methods.policies.registry import POLICIES
from opt_tree.methods.registry import Method, Registry
from opt_tree.methods.verifiers.registry import VERIFIERS
from opt_tree.tools.presets import PRESETS

FAMILIES: dict[str, Registry] = {
    "policy": POLICIES,
    "verifier": VERIFIERS,
    "drafter": KINDS,
    "controller": CONTROLLERS,
    "preset": PRESETS,
}
METHODS = [method for family in FAMILIES.values() for method in family.values()]


def test_what_is_decorated_is_listed_and_left_as_it_is() -> None:
    family: Registry = Registry("option", Method)

    def double(number: int) -> int:
        return 2 * number

    assert family.register("double", about="twice as much", paper="1234.56789")(double) is double
    assert family["double"] == Method("double", double, "twice as much", "1234.56789")
    family.register("double", about="loaded again")(double)
    assert family.named("double").about == "loaded again"
    with pytest.raises(ValueError, match=r"two option methods are called double: .*double, .*says_what_it_is"):
        family.register("double", about="another one")(test_every_method_says_what_it_is)
    with pytest.raises(ValueError, match="unknown option 'half'; there are double"):
        family.named("half")


def test_a_file_in_the_folder_is_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At any depth, and sorted by name whatever the files are called."""
    package = tmp_path / "toys"
    (package / "deep").mkdir(parents=True)
    (package / "__init__.py").write_text(
        "from opt_tree.methods.registry import Method, Registry\nTOYS = Registry('toy', Method, package=__name__)\n"
    )
    (package / "deep" / "__init__.py").write_text("")
    for path, name in (("a.py", "top"), ("deep/z.py", "ball")):
        (package / path).write_text(
            f"import toys\n@toys.TOYS.register('{name}', about='a {name}')\ndef make(): return '{name}'\n"
        )
    monkeypatch.syspath_prepend(tmp_path)
    toys = importlib.import_module("toys")
    assert "toys.a" not in sys.modules, "nothing is imported before somebody asks"
    assert list(toys.TOYS) == ["ball", "top"] and toys.TOYS["ball"].make() == "ball"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_not_empty_and_calls_itself_by_its_name(family: str) -> None:
    assert len(FAMILIES[family]) >= 4 and FAMILIES[family].family == family
    assert family == "preset" or list(FAMILIES[family]) == sorted(FAMILIES[family])


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_every_method_says_what_it_is(method: Method) -> None:
    assert len(method.about.split()) > 2 and "\n" not in method.about and not method.about.endswith(".")
    assert re.fullmatch(r"(\d{4}\.\d{5})?", method.paper)


def test_verifiers_are_called_as_they_are_registered() -> None:
    assert all(method.make.__name__ == name for name, method in VERIFIERS.items())


def test_no_function_hides_a_module() -> None:
    folder = opt_tree.methods.verifiers
    for module in pkgutil.iter_modules(folder.__path__):
        assert isinstance(getattr(folder, module.name), types.ModuleType), module.name
