"""Wrong shapes are noticed: at the first call, and after calls that were right."""

import pytest
import shapes
import torch
from jaxtyping import Float, TypeCheckError
from torch import Tensor


def noticed(annotated):
    return shapes.remembering(annotated, typechecker=shapes.checked)


def product(
    left: Float[Tensor, "rows inner"], right: Float[Tensor, "inner columns"], out: Float[Tensor, "..."] | None = None
) -> Float[Tensor, "rows columns"]:
    return left @ right if out is None else out


def test_equal_sizes_are_asked_for_whatever_they_are() -> None:
    call = noticed(product)
    for rows, inner, columns in ((20, 30, 40), (21, 31, 41), (30, 30, 30), (1, 2, 3)):
        assert call(torch.ones(rows, inner), torch.ones(inner, columns)).shape == (rows, columns)
        with pytest.raises(TypeCheckError, match="right"):
            call(torch.ones(rows, inner), torch.ones(inner + 1, columns))
        with pytest.raises(TypeCheckError, match="return value"):
            call(torch.ones(rows, inner), torch.ones(inner, columns), torch.ones(rows + 1, columns))


def test_what_is_returned_is_looked_at_at_every_call() -> None:
    answers = iter([torch.ones(20, 9), torch.ones(20, 9), torch.ones(9, 20), torch.ones(20, 9, dtype=torch.int64)])

    @noticed
    def answer(rows: Float[Tensor, " rows"]) -> Float[Tensor, "rows 9"]:
        return next(answers)

    for _ in range(2):
        answer(torch.ones(20))
    for _ in range(2):
        with pytest.raises(TypeCheckError, match="return value"):
            answer(torch.ones(20))


def test_types_and_values_that_decide_are_looked_at() -> None:
    @noticed
    def columns(count: int, names: tuple[int, str], out: Tensor) -> Float[Tensor, "{count}"]:
        return out

    assert len(columns(3, (1, "a"), torch.ones(3))) == 3
    with pytest.raises(TypeCheckError):
        columns(4, (1, "a"), torch.ones(3))
    with pytest.raises(TypeCheckError):
        columns(3, (1, 2), torch.ones(3))
    with pytest.raises(TypeCheckError):
        columns(3.0, (1, "a"), torch.ones(3))


def test_an_error_of_the_function_is_its_own() -> None:
    @noticed
    def half(number: int) -> int:
        if number % 2:
            raise KeyError(number)
        return number // 2

    assert half(4) == 2
    for _ in range(2):
        with pytest.raises(KeyError, match="3"):
            half(3)
