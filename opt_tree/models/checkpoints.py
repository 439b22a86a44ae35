"""What lies on disk or on the Hub: models, tokenizers, tensors, by local path, Hub id or "demo".

Owns the files: what is missing, corrupt or of another family is named in one line (`CheckpointError`).
"""

import functools
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from http.client import HTTPException
from pathlib import Path
from ssl import SSLError
from traceback import walk_tb
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import torch
from huggingface_hub import constants
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase
from transformers.activations import ACT2FN
from transformers.utils import cached_file

from opt_tree.backends.kernels import KernelError
from opt_tree.backends.mapped import release
from opt_tree.backends.native_layers import compute_natively
from opt_tree.backends.quantised import check_weights, quantise
from opt_tree.errors import one_line, require
from opt_tree.models.chain_lm import AnyLM, wrap
from opt_tree.models.room import check_weights_fit, stored_as
from opt_tree.system.memory import out_of_memory
from opt_tree.system.nearest import nearest

CALIBRATION = "calibration.json"
TRAINING = "training.json"
"""Beside weights: how many minutes they were trained for, and on what."""
_PIECE = 1 << 24  # numbers
_PATIENCE = 5.0  # seconds, for the Hub
_TOKENIZERS = ("tokenizer*", "vocab*", "*.model")


class CheckpointError(ValueError):
    """A checkpoint cannot be used; the message names it and says why."""


@contextmanager
def refused(what: str) -> Iterator[None]:
    """Inside, whatever is wrong with a checkpoint becomes a CheckpointError that begins with `what`."""
    try:
        yield
    except CheckpointError:
        raise
    except (ValueError, TypeError, KernelError) as error:
        raise CheckpointError(f"{what}: {error}") from error
    except KeyError as error:
        raise CheckpointError(f"{what}: {_cause(error)}") from error


def _cause(error: BaseException, path: str = "") -> str:
    """What an error of transformers' says, as part of one line. An unknown activation is a KeyError with its name only.

    `path`: a folder whose config.json says which field has that name; without one it is `hidden_act`, as in a head.
    """
    if not any(frame.f_locals.get("self") is ACT2FN for frame, _ in walk_tb(error.__traceback__)):
        return one_line(error)
    name, file = error.args[0], Path(path) / "config.json"
    told = json.loads(file.read_text()) if path and file.is_file() else {}
    parts = [part for part in (told, *told.values()) if isinstance(part, dict)]  # a model of images has nested configs
    fields = [field for part in parts for field, value in part.items() if value == name]
    return f"{fields[0] if fields else 'hidden_act'} {name!r} is no activation that transformers knows"


class MissingFileError(CheckpointError, FileNotFoundError):
    """A checkpoint lacks a file."""


def load_causal_lm(
    path: str,
    dtype: str | torch.dtype = "auto",
    device: str = "cpu",
    weights: str | None = None,
    **model_options: Any,
) -> AnyLM:
    """Load any transformers causal LM and wrap it as what it can be (see `opt_tree.models.chain_lm.wrap`).

    `weights`: "int8" or "int4", on a CPU; None: as the dtype says.
    """
    kept = as_dtype(dtype, device)
    if not model_options.keys() & {"device_map", "tp_plan", "distributed_config"}:
        model_options["device_map"] = device
    model_options.setdefault("attn_implementation", None)
    if weights is not None:
        with refused(path):
            check_weights(weights)
    if model_options.get("device_map") == "cpu" and "quantization_config" not in model_options:
        with refused(f"cannot load {path}"):
            check_weights_fit(path, kept, weights)
    if weights is None:
        return wrap(_load_whole(AutoModelForCausalLM, path, dtype=kept, **model_options))
    # Weights that lie in the file as bfloat16 are quantised from there: as float32 they would all be in memory at once.
    narrow = kept is torch.float32 and stored_as(path) == {"BF16"}
    model = _load_whole(AutoModelForCausalLM, path, dtype=torch.bfloat16 if narrow else kept, **model_options)
    if narrow and any(buffer.dtype == torch.bfloat16 for buffer in model.buffers()):  # computed, and rounded already
        model = _load_whole(AutoModelForCausalLM, path, dtype=kept, **model_options)
    with refused(f"cannot quantise {path}"):
        quantise(model, weights)
    if narrow:
        for parameter in model.parameters():
            parameter.data = _widened(parameter.data)
        model.to(kept)
        model.config.dtype = kept
    compute_natively(model)
    return wrap(model)


def _widened(weight: Tensor) -> Tensor:
    """The numbers of a weight in float32; of a file's pages memory holds those of a piece at a time."""
    wide = torch.empty(weight.shape, dtype=torch.float32)
    for to, piece in zip(wide.view(-1).split(_PIECE), weight.reshape(-1).split(_PIECE), strict=True):
        to.copy_(piece)
        release(piece)
    return wide


def load_weights(path: str, dtype: torch.dtype) -> Any:
    """Load a causal LM as `transformers` knows it, to train it or on it."""
    return _load_whole(AutoModelForCausalLM, path, dtype=dtype)


def load_config(path: str) -> Any:
    """Load a model's config, as `transformers` knows it."""
    return _load(AutoConfig, path)


def load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    """Load the tokenizer stored at `path`."""
    require(str, path=path)
    if Path(path).is_dir() and not any(any(Path(path).glob(form)) for form in _TOKENIZERS):
        raise CheckpointError(f"{path} has no tokenizer (no {', '.join(_TOKENIZERS)}): is it a whole model?")
    return _load(AutoTokenizer, path)


def load_tensors(
    path: str,
    names: tuple[str, ...] = ("model.safetensors",),
    pickle: str = "pytorch_model.bin",
    unfilled: tuple[str, ...] = (),
) -> dict[str, Tensor]:
    """Read a checkpoint's tensors from safetensors, whole or in parts, else from a pickle that may hold tensors only.

    Parts are those that `model.safetensors.index.json` names. `unfilled`: tensors that are left out where they hold
    nothing but NaN. CheckpointError for files that are missing or corrupt, and for numbers that are not finite.
    """
    for name in names:
        for read in (_read_whole, _read_parts):
            with suppress(FileNotFoundError):
                return check_finite(*read(path, name), unfilled)
    file = find_file(path, pickle, f"{' or '.join(names)} or {pickle}")
    try:
        tensors = torch.load(file, weights_only=True, map_location="cpu")
    except Exception as error:
        raise CheckpointError(f"{file} is corrupt or holds more than tensors: {one_line(error)}") from error
    if not isinstance(tensors, dict) or not all(isinstance(tensor, Tensor) for tensor in tensors.values()):
        raise CheckpointError(f"{file} does not hold named tensors") from None
    return check_finite(file, tensors, unfilled)


def _read_whole(path: str, name: str) -> tuple[Path, dict[str, Tensor]]:
    file = find_file(path, name)
    try:
        return file, load_file(file)
    except SafetensorError as error:
        raise CheckpointError(f"{file} is corrupt: {one_line(error)}") from error


def _read_parts(path: str, name: str) -> tuple[Path, dict[str, Tensor]]:
    """Read the files that an index names, each once. A part that is not there is no file that may be missing."""
    index = find_file(path, f"{name}.index.json")
    try:
        places = {str(tensor): str(part) for tensor, part in json.loads(index.read_text())["weight_map"].items()}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{index} does not say where tensors lie: {one_line(error)}") from error
    tensors: dict[str, Tensor] = {}
    for part in dict.fromkeys(places.values()):
        if Path(part).name != part or not part.endswith(".safetensors"):
            raise CheckpointError(f"{index} names {part!r:.80}, which is no file of safetensors beside it")
        try:
            tensors |= _read_whole(path, part)[1]
        except FileNotFoundError as error:
            raise CheckpointError(f"{path} lacks a part of its weights: {part}") from error
    if missing := sorted(places.keys() - tensors.keys()):
        raise CheckpointError(f"{path} lacks {missing[0]}, which should be in {places[missing[0]]}")
    return index, tensors


def check_finite(where: str | Path, tensors: dict[str, Tensor], unfilled: tuple[str, ...] = ()) -> dict[str, Tensor]:
    """Return a drafter's weights if all are finite numbers, as their sums then are: else it would draft in vain.

    Of `unfilled`, under these names or behind `model.`, what is nothing but NaN is left out.
    """
    found = {}
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and tensor.dtype.itemsize < 2:
            raise CheckpointError(f"{where} holds quantised weights ({tensor.dtype}), in {name}")
        if tensor.is_floating_point() and not tensor.sum(dtype=torch.float32).isfinite():
            if name.removeprefix("model.") in unfilled and bool(tensor.isnan().all()):
                continue
            raise CheckpointError(f"{where} holds numbers that are not finite, in {name}")
        release(tensor)  # whether it is read again is not known here
        found[name] = tensor
    return found


def find_file(path: str, name: str, wanted: str | None = None) -> Path:
    """Find a file of a local folder or a Hub repository."""
    require(str, path=path)
    if Path(path).is_dir():
        if not (file := Path(path) / name).is_file():
            raise MissingFileError(f"{path} has no {wanted or name}")
        return file
    check_is_folder(path)
    try:
        found = cached_file(path, name, local_files_only=hub_is_away())
        assert found is not None
        return Path(found)
    except (OSError, ValueError) as error:
        if "does not appear to have a file" in str(error):
            raise MissingFileError(f"{path} has no {wanted or name}") from error
        raise CheckpointError(_absent(path)) from error


def _load(factory: Any, path: str, **options: Any) -> Any:
    """Call `factory.from_pretrained`, turning its many errors into one line with the path in it."""
    require(str, path=path)
    check_is_folder(path)
    if not Path(path).is_dir() and hub_is_away():
        options["local_files_only"] = True
    try:
        return factory.from_pretrained(path, **{key: value for key, value in options.items() if value is not None})
    except SafetensorError as error:
        raise CheckpointError(f"the weights in {path} are corrupt: {one_line(error)}") from error
    except Exception as error:  # of whatever kind: a config may hold anything
        missing = not Path(path).is_dir() and isinstance(error, OSError)
        why = out_of_memory(error) or _cause(error, path)
        raise CheckpointError(_absent(path) if missing else f"cannot load {path}: {why}") from error


def _load_whole(factory: Any, path: str, **options: Any) -> Any:
    """Load a model of which every weight is there: transformers makes up those that are missing, by chance."""
    model, told = _load(factory, path, output_loading_info=True, **options)
    if missing := sorted(told["missing_keys"]):
        raise CheckpointError(
            f"{path} lacks {len(missing)} of the weights of {type(model).__name__}, {missing[0]} among them: is the "
            "checkpoint whole, and of this class?"
        )
    if shapes := sorted(str(one) for one in told.get("mismatched_keys", ())):
        raise CheckpointError(f"{path} has weights of other shapes than its config says: {shapes[0]}")
    return model


def check_is_folder(path: str) -> None:
    """Raise CheckpointError for what can only be a path, where there is no folder."""
    if Path(path).is_dir() or not (Path(path).exists() or path.startswith((".", "/", "~")) or path.count("/") > 1):
        return
    beside = [one.name for one in Path(path).parent.glob("*/")] if Path(path).parent.is_dir() else []
    near = None if Path(path).exists() else nearest(Path(path).name, beside)
    raise CheckpointError(f"no model folder at {path}{f'; did you mean {Path(path).with_name(near)}?' if near else ''}")


def check_is_there(path: str) -> None:
    """Raise CheckpointError for a folder that is not there, and for a model that the Hub does not have."""
    check_is_folder(path)
    in_cache = Path(constants.HF_HUB_CACHE) / f"models--{path.replace('/', '--')}"
    if Path(path).is_dir() or (hub_is_away() and in_cache.is_dir()):
        return
    with suppress(MissingFileError):  # a store has none
        find_file(path, "config.json")


@functools.cache
def hub_is_away() -> bool:
    """Whether nothing answers for the Hub, through a proxy or not, within seconds.

    Asked once: its library tries again for minutes, file by file.
    """
    if constants.HF_HUB_OFFLINE:
        return True
    answers: list[bool] = []
    asking = threading.Thread(target=lambda: answers.append(_hub_answers()), daemon=True)
    asking.start()
    asking.join(_PATIENCE + 1)  # names are looked up without a limit of time
    return not any(answers)


def _hub_answers() -> bool:
    try:
        urlopen(Request(constants.ENDPOINT, method="HEAD"), timeout=_PATIENCE).close()
    except HTTPError:
        return True
    except (OSError, HTTPException) as error:  # its library may have certificates that Python has not
        return isinstance(getattr(error, "reason", None), SSLError)
    return True


def _absent(path: str) -> str:
    return f"no model called {path}: not a local folder, and not found in the Hub cache or on the Hub (offline?)"


def read_config(path: str, what: str) -> dict[str, Any]:
    """Read config.json of a folder or a Hub repository; a CheckpointError says that it is of no `what`."""
    file = find_file(path, "config.json")
    try:
        return dict(json.loads(file.read_text()))
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"{file} is not the config of {what}: {one_line(error)}") from error


def read_own_config(path: str, kind: str, complaint: str) -> dict[str, Any]:
    """Read config.json of a folder that this library wrote. CheckpointError, with `complaint`, for another kind."""
    config = read_config(path, f"an {kind}")
    if (found := config.get("kind")) != kind:
        raise CheckpointError(f"{path} {complaint}: config.json names {found or 'another kind'}")
    return config


def as_dtype(dtype: str | torch.dtype, device: str) -> str | torch.dtype:
    """Return the dtype that a name stands for; "auto" as described in `load_pair`."""
    require((str, torch.dtype), dtype=dtype)
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype == "auto":
        if torch.device(device).type != "cpu":
            return "auto"
        return torch.bfloat16 if fast_bfloat16() else torch.float32
    short = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "fp64": "float64"}  # torch has the other names
    found = getattr(torch, short.get(dtype, dtype), None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point or found.itemsize < 2:
        raise CheckpointError(f"unknown dtype {dtype!r}; try float32, bfloat16 or float16")
    return found


def require_device(device: str) -> None:
    """Raise CheckpointError where this machine, or this build of torch, has no such device, and for MPS."""
    if device.partition(":")[0] == "mps":
        raise CheckpointError(
            "device 'mps' has no float64, in which texts are drawn and models are checked: take 'cpu'"
        )
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # torch asserts that it was compiled with CUDA
        raise CheckpointError(f"no device {device!r} here: {str(error).splitlines()[0]}") from error


def fast_bfloat16() -> bool:
    """Whether this CPU multiplies bfloat16 natively; where it does not, bfloat16 is slower than float32."""
    return any(getattr(torch.cpu, name, bool)() for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"))


def read_minutes(path: str) -> float | None:
    """The minutes of training that are noted beside some weights, or None."""
    return _noted(path, TRAINING, "minutes", lambda minutes: minutes >= 0, "does not say the minutes")


def read_calibration(path: str) -> float | None:
    """The sharpening temperature stored beside a drafter, or None."""
    return _noted(path, CALIBRATION, "temperature", lambda temperature: temperature > 0, "is not a calibration")


def _noted(path: str, name: str, key: str, fits: Callable[[float], bool], complaint: str) -> float | None:
    """A number of a JSON file beside a checkpoint, or None without the file."""
    try:
        if not fits(number := float(json.loads(find_file(path, name).read_text())[key])):
            raise ValueError(f"{key} of {number}")
        return number
    except (FileNotFoundError, CheckpointError):
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path}/{name} {complaint}: {one_line(error)}") from error


def load_named(head: nn.Module, tensors: Mapping[str, Tensor], complaint: str) -> None:
    """Load a head's tensors; ValueError names every one that is missing, unexpected or misshapen, after `complaint`.

    Rotary frequencies, which old checkpoints hold, are left out: a head computes its own.
    """
    own = head.state_dict()
    problems = [f"missing {name}" for name in own if name not in tensors]
    problems += [f"unexpected {name}" for name in tensors if name not in own and "rotary_emb" not in name]
    problems += [
        f"{name} is {tuple(tensors[name].shape)}, expected {tuple(own[name].shape)}"
        for name in own
        if name in tensors and tensors[name].shape != own[name].shape
    ]
    problems += [  # whole numbers, where a head has others: quantised weights would be copied as they are
        f"{name} is packed ({tensors[name].dtype})"
        for name in own
        if name in tensors and own[name].is_floating_point() and not tensors[name].is_floating_point()
    ]
    if problems:
        raise ValueError(f"{complaint}: {'; '.join(problems)}")
    head.load_state_dict({name: tensors[name] for name in own})
