"""The versions of torch and transformers that the library was tested with: it uses private parts of both.

pyproject.toml admits more of them, and requirements/library.txt pins the newest. Another one is worth a line, no error.
"""

import warnings
from collections.abc import Mapping
from importlib.metadata import version

from packaging.version import Version

TESTED = {"torch": ("2.13", "2.13"), "transformers": ("5.17", "5.24")}
"""The first and the last minor version of each."""


def check_versions(installed: Mapping[str, str] | None = None) -> None:
    """Warn, one line each, of what is installed in another version than those tested; imports neither."""
    installed = {name: version(name) for name in TESTED} if installed is None else installed
    for name, (first, last) in TESTED.items():
        if not Version(first).release <= Version(installed[name]).release[:2] <= Version(last).release:
            tested = first if first == last else f"{first} to {last}"
            warnings.warn(
                f"opt_tree was tested with {name} {tested} and meets {installed[name]}: private parts may differ",
                stacklevel=3,
            )
