"""Weights in a file that is mapped: what is written to them is seen, and their pages are given back without loss."""

import os
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from opt_tree.backends.mapped import mapped, release
from opt_tree.backends.snapshot import Snapshot

pytestmark = pytest.mark.skipif(not os.path.exists("/proc/self/pagemap"), reason="the system does not tell of pages")
ROWS, COLUMNS = 2048, 1031  # 8.4 MB, whose ends lie within pages
NAMES = ("first", "second")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    save_file({name: torch.randn(ROWS, COLUMNS) for name in NAMES}, tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


@pytest.fixture
def model(file: Path) -> nn.Module:
    """Two layers whose weights lie in the file."""
    module = nn.ModuleDict({name: nn.Linear(COLUMNS, ROWS, bias=False, device="meta") for name in NAMES})
    with safe_open(file, "pt") as opened:
        for name in NAMES:
            module[name].weight = nn.Parameter(opened.get_tensor(name), requires_grad=False)
    if mapped(module["first"].weight) is None:
        pytest.skip("these tensors are not mapped here")
    return module


def test_only_large_weights_in_files_are_known(model):
    assert mapped(torch.randn(ROWS, COLUMNS)) is None
    assert mapped(model["first"].weight[:10]) is None
    assert mapped(model["first"].weight.T) is None


@pytest.mark.parametrize("row, column", [(0, 0), (ROWS // 2, 5), (ROWS - 1, COLUMNS - 1)])
@pytest.mark.parametrize("name", NAMES)
def test_a_number_that_is_written_is_seen_and_named(model, name, row, column):
    snapshot = Snapshot(model)
    assert snapshot.change() is None
    other = next(one for one in NAMES if one != name)
    model[name].weight.data[row, column] += 1
    assert snapshot.change().what == f"{name}.weight was changed"
    assert mapped(model[other].weight) is not None


def test_a_file_that_is_written_to_is_seen_and_one_that_is_replaced_is_another(model, file, tmp_path):
    snapshot = Snapshot(model)
    other = tmp_path / "other"
    other.write_bytes(file.read_bytes())
    other.replace(file)
    assert snapshot.change() is None
    file.unlink()
    assert snapshot.change() is None


def test_a_file_that_is_written_to_is_seen(model, file):
    snapshot = Snapshot(model)
    with file.open("r+b") as opened:
        opened.seek(-4, os.SEEK_END)
        opened.write(b"abcd")
    os.utime(file, ns=(1, 1))
    assert snapshot.change() is not None


def test_pages_are_given_back_and_what_was_written_stays(model):
    def resident() -> int:
        return psutil.Process().memory_info().rss

    weight = model["first"].weight
    before = weight.clone()
    snapshot, read = Snapshot(model), resident()
    release(weight)
    assert read - resident() > 0.8 * weight.nbytes
    assert torch.equal(weight, before) and snapshot.change() is None
    weight.data[ROWS // 2] = 0
    release(weight)
    assert not weight[ROWS // 2].any() and mapped(weight) is None


def test_memory_of_other_kinds_keeps_what_was_written(tmp_path):
    """None of it is asked for its file: pages tell whether they are one's."""
    numbers = torch.randn(ROWS, COLUMNS)
    numbers.numpy().tofile(tmp_path / "numbers")
    written = [numbers.clone(), numbers.clone().share_memory_(), torch.zeros(ROWS, COLUMNS)]
    for mode in ("r+", "c"):
        written.append(torch.from_numpy(np.memmap(tmp_path / "numbers", np.float32, mode, shape=(ROWS, COLUMNS))))
    for tensor in written:
        tensor[ROWS // 2] = 7
        before = tensor.clone()
        release(tensor)
        assert torch.equal(tensor, before)
