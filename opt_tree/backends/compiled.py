"""Forwards compiled ahead of time for this CPU: torch.export and AOTInductor, one package a model, kept in the cache.

Owns the export, the compilation and the calls of a package. On a small model most of an eager forward is repacking of
weights and dispatch; a package has its weights packed and its kernels fused. Rows, keys and the cache's capacity are
symbols of the graph, so that nothing is compiled twice, however long a text becomes.
"""

import time
import warnings
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from opt_tree.backend import Inputs, takes
from opt_tree.backends.body import Body
from opt_tree.backends.canonical import SOURCE
from opt_tree.backends.hidden_states import WithHiddenStates
from opt_tree.backends.package_cache import Package, facts_of, package_of
from opt_tree.backends.packed import Packed
from opt_tree.backends.quantised import SOURCE as QUANTISED
from opt_tree.backends.quantised import QuantisedLinear
from opt_tree.cache import KVCache, LayerShape
from opt_tree.errors import one_line
from opt_tree.target import Output

OPTIONS: dict[str, Any] = {"freezing": True, "cpp.enable_concat_linear": True}
"""Weights packed when the package is made, and projections of the same input in one product."""
TIMED: dict[str, Any] = {
    "max_autotune": True,
    "max_autotune_gemm_backends": "ATEN,CPP",
    "autotune_num_choices_displayed": 0,
    "max_autotune_report_choices_stats": False,
}
"""Beside these for drafters: each product by the library or by generated code, whichever is faster for a few rows. Most
of a small drafter's are done before the library has found out what it is asked for; a target's are not."""
APART = "aot_inductor.package_constants_in_so"
"""Whether a package has the weights in it. Quantised ones stay where the model has them, in large pages."""
LARGEST = 256
"""Rows of a forward above which eager is as good: its products dominate."""
_ROWS, _PREFIX = 4, 40  # of the example that is traced, in each of two lanes


class CompileError(RuntimeError):
    """The model cannot be compiled here; the message says why in one line."""


class Compiled(WithHiddenStates):
    """Calls a package. Forwards of more than `LARGEST` rows (a prefill's) are eager.

    The final hidden states are always returned: they cost nothing, and a target has one package for all its drafters.
    Where another layer is watched later, or the model is changed, forwards are eager until it is compiled again.
    """

    name = "aot"
    layers: tuple[int, ...]

    def __init__(
        self,
        eager: Packed,
        kinds: tuple[str, ...] = (),
        make: bool = True,
        drafts: bool = False,
    ) -> None:
        """Find the package of this model, or make it. Raises CompileError.

        `kinds` names the masks where there are several. With make=False only what is
        there is taken. `drafts`: a drafter runs it, a few rows at a time.
        """
        super().__init__(eager.network)
        self.eager, self.kinds, self.layers = eager, kinds, eager.layers
        self.shapes = eager.new_cache().shapes
        self.canonical, self.packed = eager.packed.canonical, eager.packed.wanted
        traced = Traced(kinds, tuple(sorted({-1, *eager.layers})), drafts, self.canonical, bool(_shared(eager.network)))
        self.traced = traced.layers
        _check_on_cpu(eager.network)
        self.package = package_of(_facts(eager.network, traced))
        self._call = _load_or_make(self.package, self, traced, make)

    def __getstate__(self) -> dict[str, Any]:
        """Everything but the loaded code: a copy loads its package again."""
        return {key: value for key, value in self.__dict__.items() if key != "_call"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        try:
            self._call = _load(self.package.checked_file(), _shared(self.network))
        except (OSError, RuntimeError) as error:
            self._give_up(f"its compiled package is gone ({one_line(error)})")

    def watch(self, layers: tuple[int, ...]) -> None:
        self.eager.watch(layers)
        self.layers = self.eager.layers
        if missing := [layer for layer in self.layers if layer not in self.traced]:
            self._give_up(f"layers {missing} are watched, which its package lacks")

    def begin_text(self) -> bool:
        if self.eager.begin_text():
            return True
        assert self.eager.change is not None
        self._give_up(f"{self.eager.change.what} since its forwards were compiled")
        return False

    def new_cache(self) -> KVCache:
        return self.eager.new_cache()

    def shape(self, rows: int, first_slot: int) -> tuple[int, int]:
        """See `Backend.shape`. A package of one row is no faster, and one that takes any number begins at two."""
        return self.eager.shape(max(rows, 2), first_slot)

    def _give_up(self, why: str) -> None:
        """Run eager forwards from now on, with packed weights if they had been; say so once."""
        if self.name != "eager":
            self.name = "eager"
            self.eager.packed.pack(self.packed)
            warnings.warn(f"{type(self.network).__name__}: {why}; eager until compiled again", stacklevel=5)

    def forward(self, inputs: Inputs, cache: Any) -> Output:
        if not self.takes(inputs.numbers[0].numel()):
            return self.eager.forward(inputs, cache)
        return self.call(inputs, cache.views)

    def takes(self, rows: int) -> bool:
        """Whether the package is for forwards of so many rows, those of all lanes together.

        A canonical one is for any: eager forwards have other bits.
        """
        return (rows <= LARGEST or self.canonical) and self.name != "eager"

    def call(self, inputs: Inputs, views: list[Tensor]) -> Output:
        """Call the package on some texts, whose rows `views` are."""
        mask = inputs.mask
        masks = [mask[kind] for kind in self.kinds] if isinstance(mask, dict) else [mask]
        given = [inputs.numbers, *masks, *views]  # as `example` orders them
        if inputs.features is not None:
            given.append(inputs.features)
        if self._keeps_logits:
            rows = inputs.numbers.shape[2]
            given.append(torch.arange(rows - 1 if inputs.last_only else 0, rows))
        logits, *outputs = self._call(given)
        return Output(logits, {layer: outputs[self.traced.index(layer)] for layer in self.layers})


def _check_on_cpu(model: Any) -> None:
    """Raise CompileError for a model that is not on the CPU as a whole."""
    placement = getattr(model, "hf_device_map", None) or {}
    devices = {weight.device.type for weight in model.parameters()} | {str(place) for place in placement.values()}
    if devices != {"cpu"}:
        raise CompileError(f"its weights are on {', '.join(sorted(devices))}; forwards are compiled for the CPU only")
    if any(hasattr(module, "_hf_hook") for module in model.modules()):
        raise CompileError("its weights are moved by hooks while it runs (offloading)")


class Traced(NamedTuple):
    """What a package computes beside the logits, and from which masks."""

    kinds: tuple[str, ...]
    layers: tuple[int, ...]
    drafts: bool
    canonical: bool = False
    quantised: bool = False

    @property
    def options(self) -> dict[str, Any]:
        """What the compiler is told."""
        if self.quantised:  # their products are operators, and there is nothing to pack
            return {APART: False}
        return OPTIONS | TIMED if self.drafts else OPTIONS


def _facts(model: Any, traced: Traced) -> dict[str, Any]:
    computed = {"masks": traced.kinds, "layers": traced.layers}
    kernel = {"canonical": SOURCE.read_text()} if traced.canonical else {}
    if traced.quantised:
        kernel["quantised"] = QUANTISED.read_text()
    return facts_of(model) | computed | kernel | {"options": traced.options, "format": 6}


def _load_or_make(
    package: Package, backend: Compiled, traced: Traced, make: bool
) -> Callable[[list[Tensor]], list[Tensor]]:
    """Return the package's call; a damaged one is made again."""
    for attempt in range(2):
        if make:
            package.ensure(lambda: _make(package, backend, traced))
        elif package.about() is None:
            raise CompileError("there is no package for it yet")
        try:
            return _load(package.checked_file(), _shared(backend.network))
        except RuntimeError as error:
            package.remove()
            if attempt or not make:
                raise CompileError(f"its package does not load: {one_line(error)}") from error
    raise AssertionError("not reached")


def _shared(model: Any) -> dict[str, Tensor]:
    """The tensors that a package takes from its model instead of having them: all, where all weights are quantised."""
    body = Body(model)
    kinds = [type(module) for module in body.modules()]
    if QuantisedLinear not in kinds or nn.Linear in kinds:
        return {}
    named = [*body.named_parameters(remove_duplicate=False), *body.named_buffers(remove_duplicate=False)]
    return {name: tensor.detach() for name, tensor in named}


def _load(file: Path, shared: dict[str, Tensor]) -> Callable[[list[Tensor]], list[Tensor]]:
    """Return a package's call, from a flat list of tensors to another; weights that are `shared` are not copied.

    `aoti_load_package` wraps the same loader; but it asks the C++ compiler what the processor can do (half a minute
    where the answer is not cached; a package runs without a compiler), and reads the structure of the inputs from JSON
    again at every call.
    """
    loader = torch._C._aoti.AOTIModelPackageLoader(str(file), "model", True, 1, -1)  # type: ignore[attr-defined]
    if not shared:
        return loader.boxed_run
    given = {name: shared[name] for name in loader.get_constant_fqns() if name in shared}
    loader.load_constants(given, False, False, True)

    def call(inputs: list[Tensor]) -> list[Tensor]:
        assert given, "they have to live as long as the package"
        return loader.boxed_run(inputs)

    return call


def _make(package: Package, backend: Compiled, traced: Traced) -> None:
    """Export and compile; write the package."""
    begin = time.perf_counter()
    model, packed = backend.network, backend.eager.packed
    cpp_compiler()
    # What the compiler warns of itself is nothing to whoever only wants tokens.
    with TemporaryDirectory() as folder, warnings.catch_warnings(action="ignore"):
        file = Path(folder) / package.file.name
        try:
            with torch.no_grad(), packed.attention():
                program = export(Body(model, traced.layers), example(model, backend.shapes, traced.kinds))
                options = traced.options
                if options.get(APART) is False and program.constants.keys() - _shared(model).keys():
                    options[APART] = True  # numbers in the model's code
                _compile(program, file, options)
        except Exception as error:  # whatever a model's code does that a graph cannot hold
            raise CompileError(one_line(error)) from error
        package.write(file, {"model": type(model).__name__, "seconds": round(time.perf_counter() - begin, 1)})


def example(model: Any, shapes: list[LayerShape], kinds: tuple[str, ...] = (), lanes: int = 2) -> dict[str, Any]:
    """Inputs of a forward of a few rows in each lane, to trace it with: values do not matter, sizes are symbols.

    By the names that `Body` takes them by, in its order.
    """
    keys, embeddings = _PREFIX + _ROWS, model.get_input_embeddings().weight
    mask = torch.ones(lanes, 1, _ROWS, keys, dtype=torch.bool)
    places = torch.arange(_PREFIX, keys).expand(lanes, _ROWS)
    sizes = [(s.heads, 2 * keys, dim, s.dtype) for s in shapes for dim in (s.key_dim, s.value_dim)]
    inputs: dict[str, Any] = {
        "ints": torch.stack([torch.zeros_like(places), places, places]),
        "mask": {kind: mask.clone() for kind in kinds} if kinds else mask,
        "kv": [torch.zeros(lanes, *size, dtype=dtype) for *size, dtype in sizes],
    }
    if takes(model, "features"):
        inputs["features"] = torch.zeros(lanes, _ROWS, embeddings.shape[1], dtype=embeddings.dtype)
    if takes(model, "logits_to_keep"):
        inputs["kept"] = torch.arange(_ROWS)
    return inputs


def export(body: nn.Module, inputs: dict[str, Any]) -> torch.export.ExportedProgram:
    """Trace a body with lanes, rows, keys, capacity and kept rows as symbols; a size of one is one like others."""
    import torch.fx.experimental._config as symbols

    dim = torch.export.Dim
    lanes, rows = dim("lanes", min=1, max=1 << 12), dim("rows", min=1, max=1 << 12)
    keys, capacity = dim("keys", min=2, max=1 << 20), dim("capacity", min=2)
    mask: Any = {0: lanes, 2: rows, 3: keys}
    if isinstance(inputs["mask"], dict):
        mask = {kind: mask for kind in inputs["mask"]}
    shapes = {
        "ints": {1: lanes, 2: rows},
        "mask": mask,
        "kv": [{0: lanes, 2: capacity}] * len(inputs["kv"]),
        "features": {0: lanes, 1: rows},
        "kept": {0: dim("kept", min=1, max=1 << 12)},
    }
    with symbols.patch(backed_size_oblivious=True):  # type: ignore[attr-defined]
        known = {name: shapes[name] for name in inputs}
        return torch.export.export(body, (), inputs, dynamic_shapes=known, strict=False)


def _compile(program: torch.export.ExportedProgram, file: Path, options: dict[str, Any]) -> None:
    """Compile an exported body into `file`. What the compiler leaves behind goes with a folder of its own."""
    from torch._inductor.cpu_vec_isa import pick_vec_isa
    from torch._inductor.utils import fresh_cache  # its import takes seconds

    pick_vec_isa()  # tries five small programs, and remembers the answer in the compiler's own cache
    with fresh_cache():  # what it is given it adds to
        torch._inductor.aoti_compile_and_package(program, package_path=str(file), inductor_configs=dict(options))


def cpp_compiler() -> str:
    """The compiler that makes packages. Raises CompileError."""
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        return get_cpp_compiler()
    except Exception as error:
        raise CompileError("there is no C++ compiler on this machine (looked for $CXX and g++)") from error
