"""A model that is changed after it was wrapped, packed or compiled: the next text is the changed model's."""

import copy
import pickle
import warnings
from typing import Any

import pytest
import torch
from tiny_models import build, prompt, tiny, tiny_drafter
from torch import nn
from torch.nn.utils import parametrizations, prune

from opt_tree import generate_batch
from opt_tree.backends import prepacked as packed
from opt_tree.backends.hidden_states import hidden_states
from opt_tree.backends.snapshot import Snapshot, _strided, fits, sample
from opt_tree.draft_model import CausalLMDrafter
from opt_tree.models.causal_lm import CausalLM, UnsupportedModelError
from opt_tree.models.compiling import compile_forwards
from opt_tree.policy import OptTree
from opt_tree.tools.presets import opt, plain

NEW = 8


@pytest.fixture(autouse=True)
def small_weights_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "_LEAST", dict.fromkeys(packed._LEAST, 1))


def negated(model: Any) -> None:
    with torch.no_grad():
        model.lm_head.weight.mul_(-1)


def loaded(model: Any) -> None:
    model.load_state_dict({**model.state_dict(), "lm_head.weight": -model.lm_head.weight})


def stepped(model: Any) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=5.0)
    ids = torch.tensor([prompt(12)])
    model(ids, labels=ids).loss.backward()
    optimizer.step()
    model.zero_grad()


def another_head(model: Any) -> None:
    head = nn.Linear(model.lm_head.in_features, model.lm_head.out_features, bias=False, dtype=model.dtype)
    head.weight = nn.Parameter(-model.lm_head.weight.detach())
    model.lm_head = head


def hooked(model: Any) -> None:
    model.lm_head.register_forward_hook(lambda _, args, output: -output)


def another_forward(model: Any) -> None:
    own = model.lm_head.forward
    model.lm_head.forward = lambda rows: -own(rows)


class Adapted(nn.Module):
    """As PEFT puts an adapter of low rank around a layer."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        numbers = torch.Generator().manual_seed(0)
        self.down = nn.Parameter(torch.randn(2, base.in_features, generator=numbers).to(base.weight.dtype))
        self.up = nn.Parameter(torch.randn(base.out_features, 2, generator=numbers).to(base.weight.dtype))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.base(rows) + rows @ self.down.T @ self.up.T


def adapted(model: Any) -> None:
    for layer in model.model.layers:
        layer.mlp.down_proj = Adapted(layer.mlp.down_proj)


def rows_by_data(model: Any) -> None:
    """As new tokens get the mean of the others."""
    model.lm_head.weight.data[7:9] = 200 * model.lm_head.weight.data.mean(0)


def column_by_data(model: Any) -> None:
    model.model.layers[0].mlp.down_proj.weight.data[:, 5] = 30


def number_by_data(model: Any) -> None:
    """One that lies in no sample of rows and columns."""
    model.lm_head.weight.data[5, 7] += 100


def pruned(model: Any) -> None:
    for layer in model.model.layers:
        prune.l1_unstructured(layer.mlp.down_proj, "weight", amount=0.7)


def normalised(model: Any) -> None:
    parametrizations.weight_norm(model.lm_head)
    with torch.no_grad():
        model.lm_head.parametrizations.weight.original0.mul_(-1)


class Quantised(nn.Parameter):
    """A parameter of another kind, as quantisers put it into a layer; it multiplies by itself."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain = [one.as_subclass(torch.Tensor) if isinstance(one, cls) else one for one in args]
        if function is nn.functional.linear:
            plain[1] = plain[1].round(decimals=1)
        return function(*plain, **(kwargs or {}))


def quantised(model: Any) -> None:
    for module in model.modules():
        if type(module) is nn.Linear:
            module.weight = Quantised(module.weight.detach(), False)


CHANGES = [
    negated,
    loaded,
    stepped,
    another_head,
    hooked,
    another_forward,
    adapted,
    rows_by_data,
    column_by_data,
    number_by_data,
    pruned,
    normalised,
    quantised,
]


def decoder_of(lm: CausalLM) -> Any:
    drafter = CausalLM(copy.deepcopy(tiny_drafter("llama")).float())
    return opt(lm, CausalLMDrafter(drafter, lm.vocab), OptTree(7, 0.0, 3))


def text_of(model: Any) -> list[int]:
    """What transformers writes."""
    ids = torch.tensor([prompt(9)])
    whole = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NEW, pad_token_id=0
    )
    return whole[0, 9:].tolist()


@pytest.fixture
def lm() -> CausalLM:
    model = build(tiny("llama").config, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    return CausalLM(model)


# What a model has become is asked the same way whatever ran it: a package is one of each way to change.
PACKAGED = [negated, another_head, hooked, adapted, number_by_data, quantised]


@pytest.mark.quick("negated-False", "hooked-False", "adapted-False", "number_by_data-False", "quantised-False")
@pytest.mark.parametrize(
    ("change", "compiled"),
    [*((change, False) for change in CHANGES), *((change, True) for change in PACKAGED)],
)
def test_the_next_text_is_the_changed_models(change, compiled, lm, fake):
    """By trees and plainly, by a copy, with kept rows and side by side, from packed weights and from a package."""
    decoder = decoder_of(lm)
    before = decoder.generate(prompt(9), NEW).tokens
    assert before == text_of(lm.model)
    if compiled:
        assert compile_forwards(lm) and decoder.generate(prompt(9), NEW).tokens == before
    change(lm.model)
    expected = text_of(lm.model)
    assert expected != before, "a change that changes the text"
    twin = None if change in (hooked, another_forward, quantised, normalised) else copy.deepcopy(decoder)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        assert decoder.generate(prompt(9), NEW, reuse=True).tokens == expected
        assert plain(lm).generate(prompt(9), NEW).tokens == expected
        assert [one.tokens for one in generate_batch(decoder, [prompt(9)] * 2, NEW, width=2)] == [expected] * 2
    lines = [str(one.message) for one in told if "since its forwards were compiled" in str(one.message)]
    assert len(lines) == compiled and all("eager until compiled again" in line for line in lines)
    assert bool(lm.eager.packed) == (change is not quantised), "as before it was compiled"
    if twin is not None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert twin.generate(prompt(9), NEW).tokens == expected


@pytest.mark.slow
def test_a_change_is_seen_by_a_batch_first(lm, fake):
    decoder = decoder_of(lm)
    assert compile_forwards(lm)
    decoder.generate(prompt(9), NEW)
    negated(lm.model)
    expected = text_of(lm.model)
    with pytest.warns(UserWarning, match="since its forwards were compiled; eager until compiled again"):
        found = generate_batch(decoder, [prompt(9)] * 3, NEW, width=2)
    assert [one.tokens for one in found] == [expected] * 3


@pytest.mark.slow
def test_compiled_again_it_is_fast_again(lm, fake):
    assert compile_forwards(lm)
    negated(lm.model)
    with pytest.warns(UserWarning, match=r"LlamaForCausalLM: lm_head.weight was changed since its forwards"):
        lm.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lm.reset()
        assert compile_forwards(lm) and lm.backend.name == "aot" and len(fake) == 2
        assert plain(lm).generate(prompt(9), NEW).tokens == text_of(lm.model)
    negated(lm.model)
    with pytest.warns(UserWarning, match="lm_head.weight was changed"):
        lm.reset()
    assert lm.eager.packed, "as before it was compiled first"


def test_another_vocabulary_is_refused(lm):
    lm.model.resize_token_embeddings(70)
    with pytest.raises(UnsupportedModelError, match="had 61 logits a row when it was wrapped and has 70 now"):
        plain(lm).generate(prompt(9), 4)


def test_a_model_wrapped_again_takes_no_copy_of_yesterday(lm):
    plain(lm).generate(prompt(9), 4)
    rows_by_data(lm.model)
    assert decoder_of(CausalLM(lm.model)).generate(prompt(9), NEW).tokens == text_of(lm.model)


def test_nothing_has_changed_where_nothing_has(lm):
    """Not by forwards, gradients that are only computed, pickling, a hook that came and went, or threads' stand-ins."""
    snapshot = Snapshot(lm.model)
    plain(lm).generate(prompt(9), 4)
    ids = torch.tensor([prompt(9)])
    lm.model(ids, labels=ids).loss.backward()
    pickle.dumps(lm)
    lm.model.lm_head.register_forward_hook(lambda *_: None).remove()
    assert snapshot.change() is None
    seen: list[Any] = []
    lm.watch((0,))
    lm.model.model.norm.register_forward_hook(lambda *_: seen.append(Snapshot(lm.model).change()))
    within = Snapshot(lm.model)
    lm.model.lm_head.register_forward_pre_hook(lambda *_: seen.append(within.change()))
    lm.reset()
    within = Snapshot(lm.model)
    lm.append(prompt(9), all_logits=True)
    assert seen == [None, None]
    with torch.no_grad():
        lm.model.lm_head.weight[3] = float("nan")
    assert Snapshot(lm.model).change() is None, "what is no number is equal to itself"


def test_hooks_of_a_forward_that_reads_hidden_states_are_no_change(lm):
    """Another thread may begin a text while one is in a forward whose layers are watched."""
    snapshot = Snapshot(lm.model)
    with hidden_states(lm.model, (0, -1)):
        assert snapshot.change() is None
        lm.model(torch.tensor([prompt(3)]))
    assert snapshot.change() is None


def test_a_copy_knows_what_had_changed(lm):
    snapshot = Snapshot(lm.model)
    assert copy.deepcopy(snapshot).change() is None
    negated(lm.model)
    twin = pickle.loads(pickle.dumps(snapshot))
    assert twin.model is not lm.model and twin.change() == snapshot.change() == ("lm_head.weight was changed", False)


@pytest.mark.quick(
    "dtype0-shape0",
    "dtype0-shape3",
    "dtype0-shape6",
    "dtype1-shape0",
    "dtype1-shape3",
    "dtype1-shape6",
    "dtype2-shape0",
    "dtype2-shape3",
    "dtype2-shape6",
    "dtype2-shape9",
    "dtype3-shape2",
    "dtype3-shape6",
    "dtype3-shape9",
)
@pytest.mark.parametrize("shape", [(61, 32), (32, 61), (32, 32), (7, 1), (1, 7), (5,), (), (2, 3, 4), (64, 32), (3, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.bool])
def test_a_sample_meets_every_row_and_every_column_and_its_sum_every_number(shape, dtype):
    weight = torch.zeros(shape, dtype=dtype)
    known = sample(weight)
    assert known is not None and fits(known, weight)
    flat = weight.view(-1)
    for place in range(flat.numel()):
        flat[place] = 1
        assert not fits(known, weight)
        flat[place] = 0
    assert fits(known, weight)
    if len(shape) < 2:
        return
    rows = weight.view(shape[0], -1)
    met = {divmod(int(place), rows.shape[1]) for place in _strided(torch.arange(rows.numel()).view_as(rows))}
    for places, count in zip(zip(*met, strict=True), rows.shape, strict=True):
        assert {*places} == {*range(count)}
    assert len(known.numbers) <= 2 * sum(rows.shape)


def test_a_part_of_a_tensor_is_known_wherever_it_begins():
    whole = torch.arange(41, dtype=torch.int16)
    for start in range(5):
        known = sample(whole[start:])
        assert known is not None and known.total == sample(whole[start:].clone()).total
        whole[17] += 1
        assert not fits(known, whole[start:])


@pytest.mark.parametrize(
    ("what", "dtype", "told"),
    [
        ({nn.Linear}, torch.qint8, r"LlamaForCausalLM quantises activations while it runs \(Linear\)"),
        ({"model.layers.0.mlp.down_proj"}, torch.qint8, "LlamaForCausalLM quantises activations while it runs"),
        (
            {nn.Embedding: torch.ao.quantization.float_qparams_weight_only_qconfig},
            torch.quint8,
            r"its input layer, a torch\.ao\.\S+, has no weight to read",
        ),
    ],
)
def test_a_model_that_is_quantised_dynamically_is_refused(what, dtype, told, lm) -> None:
    plain(lm).generate(prompt(4), 4)
    torch.ao.quantization.quantize_dynamic(lm.model, what, dtype=dtype, inplace=True)
    for again in (plain(lm).generate, plain(lm).generate, lambda *_: CausalLM(lm.model)):
        with pytest.raises(UnsupportedModelError, match=told):
            again(prompt(4), 4)
