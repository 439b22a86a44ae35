"""Canonical attention in Triton, without a GPU: in Triton's interpreter, and as the code that a GPU would get."""

import importlib
import re
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from in_triton import compiled, only_compiled, only_interpreted, run_interpreted
from test_canonical import DTYPES, bits, leaves_no_trace, problem
from tiny_models import ARCHITECTURES, build, prompt, random_tree
from torch import Tensor

from opt_tree.backends.canonical import ROWS, NotCanonicalError, attend, load_kernel
from opt_tree.models.canonical import make_canonical
from opt_tree.models.causal_lm import CausalLM
from opt_tree.models.compiling import compile_forwards
from opt_tree.tree import Tree


@pytest.fixture
def interpreted(request: pytest.FixtureRequest) -> ModuleType:
    """The kernels in the interpreter."""
    only_interpreted()
    request.getfixturevalue("kernel")
    return importlib.import_module("opt_tree.backends.canonical_cuda")


def test_all_that_is_interpreted() -> None:
    run_interpreted(__file__)


@pytest.mark.parametrize(
    "sizes",
    [
        {"rows": 1, "keys": 1},
        {"lanes": 2, "groups": 1, "shared": 5, "rows": 3, "keys": 16, "dim": 40},
        {"groups": 3, "shared": 3, "rows": 7, "keys": 70, "dim": 64},
    ],
)
def test_the_interpreter_computes_what_the_kernel_for_cpus_does(interpreted, sizes):
    """To rounding: the interpreter rounds a fused multiply-add twice. It knows no products of tiles in bfloat16."""
    query, key, value, mask = problem(0, torch.float32, **sizes)
    mask[0, 0, 0] = -3e38  # a row that sees no key
    given = query, key, value[..., : max(1, value.shape[-1] - 3)], mask, 0.1
    expected = attend(*given).double()
    torch.testing.assert_close(interpreted.attend(*given).double(), expected, atol=1e-5, rtol=1e-5)


def test_other_rows_lanes_slots_and_junk_leave_no_trace_in_the_interpreter(interpreted: ModuleType) -> None:
    """Of whole numbers, whose products of tiles NumPy does not round."""

    def whole(query: torch.Tensor, key: torch.Tensor, *more: Any) -> torch.Tensor:
        return interpreted.attend((4 * query).round(), (4 * key).round(), *more)

    assert leaves_no_trace(whole, torch.float32)


def test_a_mask_that_adds_other_numbers_is_loud_in_the_interpreter(interpreted: ModuleType) -> None:
    query, key, value, mask = problem(6, torch.float32, rows=2, keys=9)
    mask[0, 0, 0, 0] = -1.0
    found = interpreted.attend(query, key, value, mask, 0.25)
    assert found[0, 0].isnan().all() and found[0, 1].isfinite().all()


@pytest.mark.parametrize("capability", [80, 90])
def test_it_compiles_for_a_gpu_and_fuses_nothing_by_itself(capability: int) -> None:
    only_compiled()
    module = importlib.import_module("opt_tree.backends.canonical_cuda")
    sizes = {name: getattr(module, name) for name in ("QUERIES", "KEYS", "SUMMED", "UNROLL")} | {"DIM": 64, "WIDTH": 64}
    types = dict.fromkeys(module.OTHERS, "*bf16") | {"scores": "*fp32", "scale": "fp32"}
    for kernel in (module._score, module._weigh, module._sum):
        text = compiled(kernel, types, sizes, capability, enable_fp_fusion=False)["ptx"]
        assert ("fma.rn.f32" in text) is (kernel is module._sum)
        assert not re.search(r"\b(add|mul)\.f32", text), "what may still be fused has no .rn"


def test_without_triton_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "opt_tree.backends.canonical_cuda", raising=False)
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(NotCanonicalError, match=r"its attention kernel on CUDA is written in Triton: .*triton"):
        load_kernel("cuda")


def test_a_tree_of_60_nodes_and_its_root_go_in_one_forward() -> None:
    assert ROWS > 61


def exact_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
    """PyTorch's attention in float64, laid out as the kernels do: rows before heads."""
    groups = query.shape[1] // key.shape[1]
    keys, values = (one.double().repeat_interleave(groups, 1) for one in (key, value))
    hidden = torch.where(mask == 0, 0.0, -torch.inf).double()
    rows = torch.nn.functional.scaled_dot_product_attention(query.double(), keys, values, attn_mask=hidden, scale=scale)
    return rows.transpose(1, 2)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_on_a_gpu_other_rows_lanes_slots_and_junk_leave_no_trace(dtype: torch.dtype) -> None:
    load_kernel("cuda")

    def on_the_gpu(*given: torch.Tensor | float) -> torch.Tensor:
        return attend(*(one.cuda() if isinstance(one, torch.Tensor) else one for one in given)).cpu()

    assert leaves_no_trace(on_the_gpu, dtype)
    given = problem(0, dtype, groups=3, shared=3, rows=7, keys=70, dim=64)
    limit = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(on_the_gpu(*given, 0.1).double(), exact_attention(*given, 0.1), atol=limit, rtol=limit)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("architecture", ["llama", "mistral", "qwen3-window", "opt"])
def test_on_a_gpu_a_tree_has_the_logits_of_one_prefill_eager_and_captured(architecture, dtype) -> None:
    lm, tree, context = (
        CausalLM(build(ARCHITECTURES[architecture](), dtype=dtype).cuda()),
        random_tree(45, 1, 1),
        prompt(50),
    )
    make_canonical(lm)
    _compare(lm, context, tree)
    assert compile_forwards(lm) and lm.canonical
    _compare(lm, context, tree)


def _compare(lm: CausalLM, context: list[int], tree: Tree) -> None:
    """Compare the logits of a tree with those of prefills of some of its paths."""
    lm.reset()
    lm.append(context)
    rows = lm.score(tree).logits.clone()
    for row in range(0, len(tree), 7):
        path = tree.path_to(row)
        lm.reset()
        whole = lm.append([*context, *tree.tokens[path].tolist()], all_logits=True).logits[len(context) :]
        assert torch.equal(bits(rows[path]), bits(whole))
