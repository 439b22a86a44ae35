"""Models that have a name here: `python -m opt_tree.models` lists them, `python -m opt_tree.models NAME` fetches one.

`--from` says where from: hub, wheel, or the path of what was brought by hand: a wheel, a folder of all wheels, a GGUF
file, or a folder that transformers loads.
"""

import sys

from opt_tree.models.known import KNOWN
from opt_tree.system.command_line import Parser, run_command, work_of


def main(arguments: list[str] | None = None) -> int:
    """List or fetch; return the exit status: 2, after one line on stderr, for what cannot be done."""

    def command() -> int:
        parser = Parser("python -m opt_tree.models", __doc__)
        parser.add_argument("name", nargs="?", help=f"fetch this one: {', '.join(KNOWN)}")
        parser.add_argument("--from", dest="source", metavar="SOURCE", help="hub, wheel or a path; else what is there")
        work_of("opt_tree.models.__main__:list_or_fetch")(parser.parse_args(arguments))
        return 0

    return run_command(command)


if __name__ == "__main__":
    sys.exit(main())

import argparse
from pathlib import Path

import transformers

from opt_tree.models.checkpoints import CheckpointError
from opt_tree.models.named import cached, drafter_of, fetch, folder_of


def list_or_fetch(given: argparse.Namespace) -> None:
    """Print what there is of every model, or fetch the one that is named and print its folder."""
    transformers.logging.set_verbosity_error()
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
    packaged, file = known.packaged, f", {known.hub_file}" if known.hub_file else ""
    lines = {"licence": known.licence, "Hub": f"{known.hub}{file}"}
    lines["wheel" if len(packaged.wheels) == 1 else "wheels"] = f"{packaged.requirement}, {packaged.megabytes} MB"
    lines["size"] = f"{known.parameters / 1e6:,.0f} M parameters, {known.disk / 1e9:.1f} GB of disk"
    lines["drafter"] = f"{drafter_of(name)}"
    if here is None:
        lines["cached"] = f"no; python -m opt_tree.models {name} fetches it"
    else:
        folder, noted = here
        size = sum(path.stat().st_size for path in Path(folder).iterdir()) / 1e6
        digest = f", sha256 {noted['sha256'][:12]}" if noted.get("sha256") else ""
        lines["cached"] = f"{folder}, {size:.0f} MB, from {noted['source']}{digest}"
    return "\n".join([f"{name}: {known.about}", *(f"  {key + ':':<9} {value}" for key, value in lines.items())])
