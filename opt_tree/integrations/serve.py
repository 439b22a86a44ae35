"""An OpenAI-compatible server: chat completions and completions, each decoded by draft trees.

    pip install -r requirements/serve.txt
    opt-tree serve demo --drafter eagle:demo --drafter ngram --port 8000

For evaluation and demonstration; docs/serve.md says what is served, what is refused, and what serves in production.
"""

import sys
from dataclasses import dataclass

from opt_tree.system.command_line import Parser, check_bounds, from_fields, option, run_command, work_of


@dataclass
class ServeOptions:
    """What the server takes in, and how it decodes."""

    host: str = option("127.0.0.1", "0.0.0.0: for other machines, too")
    port: int = option(8000, "of HTTP")
    served_name: str | None = option(None, "what requests call the model; default: as it is named here")
    dtype: str = option("auto", "of the target, as `load_pair` takes it")
    weights: str | None = option(None, "on a CPU", choices=("int8", "int4"))
    compile: bool = option(False, "make compiled packages of the forwards")
    no_exact: bool = option(
        False, "in bfloat16, let rounding differ from plain decoding's, and requests share forwards"
    )
    policy: str = option("opt", "of the trees, where a request names none")
    nodes: int | None = option(None, "of a tree, where a request names none; 0: decode plainly", least=0)
    threshold: float | None = option(None, "of the policy, where a request names neither")
    lanes: int = option(4, "requests that are decoded at a time, in shared forwards", least=1)
    queue: int = option(32, "requests that may wait; more are refused with 429", least=0)
    max_context: int = option(4096, "tokens of a prompt and its answer", least=2)
    max_new_tokens: int = option(1024, "of an answer", least=1)
    max_nodes: int = option(128, "of a tree that a request asks for", least=0)

    def __post_init__(self) -> None:
        check_bounds(self)


def main(arguments: list[str] | None = None) -> int:
    """Serve until somebody stops it: SIGTERM and Ctrl-C let what is under way end. Returns 2 for bad input."""
    parser = Parser(None, __doc__, ServeOptions)
    parser.add_argument("model", nargs="?", default="demo", help="a folder, .gguf, Hub id or known name")
    parser.add_argument(
        "--drafter", action="append", metavar="SPEC", help="several: requests choose; the first if none"
    )

    def work() -> None:
        given = parser.parse_args(arguments)
        work_of("opt_tree.integrations.serve:serve")(given.model, given.drafter or [], from_fields(ServeOptions, given))

    return run_command(work)


if __name__ == "__main__":
    sys.exit(main())

from importlib.util import find_spec
from typing import TYPE_CHECKING

from opt_tree.methods.drafters.registry import DrafterOptions, check_drafter, load_drafter
from opt_tree.models.compiling import compile_forwards
from opt_tree.models.known import KNOWN
from opt_tree.models.named import drafter_of
from opt_tree.policy import OptTree
from opt_tree.system.command_line import check_port
from opt_tree.tools.pair import load_pair

if TYPE_CHECKING:
    from opt_tree.integrations.server.service import Service


def serve(model: str, drafters: list[str], options: ServeOptions) -> None:
    """Load and serve. Raises ValueError, before a model is loaded, for what is missing."""
    for spec in drafters:
        check_drafter(spec)
    if find_spec("fastapi") is None or find_spec("uvicorn") is None:
        raise ValueError("the server needs fastapi and uvicorn: pip install -r requirements/serve.txt")
    check_port(options.host, options.port)
    import uvicorn  # an extra, which the rest of the library does without

    from opt_tree.integrations.server.app import new_app

    uvicorn.run(new_app(service_of(model, drafters, options)), host=options.host, port=options.port)


def service_of(model: str, drafters: list[str], options: ServeOptions) -> "Service":
    """Load a model and its drafters, by default the one that belongs to it."""
    from opt_tree.integrations.server.engine import Engine
    from opt_tree.integrations.server.requests import TreeOptions
    from opt_tree.integrations.server.service import Limits, Service

    first = drafters[0] if drafters else drafter_of(model)
    pair = load_pair(model, first, dtype=options.dtype, weights=options.weights, exact=not options.no_exact)
    loaded = {first or "": pair.drafter}
    settings = DrafterOptions(pair.tokenizer, device=str(pair.target.device), weights=options.weights)
    for spec in drafters[1:]:
        loaded[spec] = load_drafter(spec, pair.target, settings)
    for drafter in loaded.values():  # first, so that a package has all that they read
        pair.target.watch(tuple(sorted(drafter.features)))
    for lm in (pair.target, *(lm for drafter in loaded.values() for lm in drafter.models)):
        compile_forwards(lm, options.compile)
    known = KNOWN.get(model)
    nodes, threshold = known.tree(options.weights) if known else (OptTree.nodes, OptTree.threshold)
    own = options.policy == "opt" and options.threshold is None
    tree = TreeOptions(
        policy=options.policy,
        nodes=nodes if options.nodes is None else options.nodes,
        threshold=threshold if own else options.threshold,
    )
    engine = Engine(pair.target, loaded, options.lanes, options.queue)
    limits = Limits(options.max_context, options.max_new_tokens, options.max_nodes, tree)
    return Service(options.served_name or model, pair, loaded, engine, limits)
