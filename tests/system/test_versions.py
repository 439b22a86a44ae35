"""What is tested is said once, and another version is told of in a line."""

import re
import tomllib
import warnings
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from opt_tree.system.versions import TESTED, check_versions

ROOT = Path(__file__).parents[2]


def test_what_is_tested_is_what_is_pinned_and_admitted():
    pinned = dict(re.findall(r"^(torch|transformers)==(\S+)", (ROOT / "requirements/library.txt").read_text(), re.M))
    admitted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    for name, (first, last) in TESTED.items():
        assert Version(pinned[name]).release[:2] == Version(last).release
        (known,) = (SpecifierSet(one.removeprefix(name)) for one in admitted if re.match(rf"{name}[<>=]", one))
        assert first in known and last in known


@pytest.mark.parametrize(
    ("torch", "transformers", "told"),
    [
        ("2.13.0+cpu", "5.24.0", []),
        ("2.13.1", "5.17.0", []),
        ("2.14.0", "5.20.2", ["torch 2.13 and meets 2.14.0"]),
        ("2.13.0", "5.25.0.dev0", ["transformers 5.17 to 5.24 and meets 5.25.0.dev0"]),
        ("2.9.0", "5.3.0", ["torch 2.13 and meets 2.9.0", "transformers 5.17 to 5.24 and meets 5.3.0"]),
    ],
)
def test_another_version_is_told_of(torch, transformers, told):
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        check_versions({"torch": torch, "transformers": transformers})
    assert [str(one.message) for one in seen] == [
        f"opt_tree was tested with {one}: private parts may differ" for one in told
    ]
