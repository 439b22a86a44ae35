"""opt_tree: draft-tree speculative decoding on unmodified transformers models.

Which tokens may follow (`Drafter`), which of them to draft (`TreePolicy`) and how the target judges them (`Verifier`)
are three independent questions; `Decoder` puts one answer to each into one loop.
"""

import importlib
from typing import TYPE_CHECKING, Any

import opt_tree.system.interrupted
import opt_tree.system.versions

__version__ = "0.2.0"

opt_tree.system.versions.check_versions()

if TYPE_CHECKING:
    from opt_tree.public import *  # noqa: F403
else:

    def __getattr__(name: str) -> Any:
        """Import the library when a name of it is first asked for: a command says its --help without torch."""
        if name == "__all__" or not name.startswith("__"):
            public = importlib.import_module("opt_tree.public")
            globals().update({known: getattr(public, known) for known in public.__all__}, __all__=public.__all__)
            if name in globals():  # a public name, or a folder that came with them
                return globals()[name]
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*globals(), *__getattr__("__all__")})
