"""Wrong shapes are noticed wherever the library is called. Run by tests/test_shapes.py, with the checks on."""

import numpy as np
import pytest
import torch
from jaxtyping import TypeCheckError

from opt_tree import Sampling, Tree
from opt_tree.methods.children.draws import probs_of
from opt_tree.methods.processors import by_row
from opt_tree.sampling import noise_from


def test_arguments() -> None:
    with pytest.raises(TypeCheckError, match="starts"):
        noise_from(torch.zeros(2, 2, dtype=torch.int64), 3)
    with pytest.raises(TypeCheckError, match="scores"):
        probs_of(torch.ones(2, 3, dtype=torch.int64))
    with pytest.raises(TypeCheckError, match="temperature"):
        Sampling("warm")


def test_sizes_that_have_one_name_are_equal() -> None:
    with pytest.raises(TypeCheckError, match="path_log_probs"):
        Tree(np.zeros(2, np.int64), np.array([-1, 0]), np.zeros(3), np.array([0, -1]))


def test_what_is_returned() -> None:
    with pytest.raises(TypeCheckError, match="return value"):
        by_row(lambda ids, scores: scores[:, :2], torch.ones(2, 3))
