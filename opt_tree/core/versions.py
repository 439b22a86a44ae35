"""The versions of torch and transformers that the library was tested with: it uses private parts of both.

pyproject.toml admits more of them, and requirements/library.txt pins the newest. Another one is worth a line, no error.
"""

import warnings
from collections.abc import Mapping

import torch
import transformers
from packaging.version import Version

TESTED = {"torch": ("2.13", "2.13"), "transformers": ("5.17", "5.23")}
"""The first and the last minor version of each."""
_HERE = {"torch": torch.__version__, "transformers": transformers.__version__}


def check_versions(installed: Mapping[str, str] = _HERE) -> None:
    """Warn, one line each, of what is installed in another version than those tested."""
    for name, (first, last) in TESTED.items():
        if not Version(first).release <= Version(installed[name]).release[:2] <= Version(last).release:
            tested = first if first == last else f"{first} to {last}"
            warnings.warn(
                f"opt_tree was tested with {name} {tested} and meets {installed[name]}: private parts may differ",
                stacklevel=3,
            )
