"""Compiled forwards: the same tokens as eager, packages that are never stale, and eager with a reason where they fail.

Two packages of one layer are really compiled, once for all tests here: one in float64 and a canonical one. Elsewhere
what is "compiled" is a note, and what is "loaded" runs the exported graph as it is: families, layers, masks and files.
"""

import copy
import multiprocessing
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from side_by_side import PROMPTS, decoder_of, trace
from tiny_models import ARCHITECTURES, TOLERANCE, build, padded_to, perturbed, prompt, random_tree, tiny, tiny_head
from torch import Tensor
from torch._inductor.exc import InvalidCxxCompiler
from transformers import PreTrainedModel

from opt_tree import generate_batch
from opt_tree.backend import Inputs
from opt_tree.backends import compiled as aot
from opt_tree.backends import package_cache as packages
from opt_tree.backends.body import Body
from opt_tree.backends.compiled import Compiled, CompileError
from opt_tree.backends.package_cache import Package, facts_of, package_of
from opt_tree.backends.packed import Packed
from opt_tree.draft_model import CausalLMDrafter
from opt_tree.methods.drafters.heads.eagle import EagleDrafter
from opt_tree.models import compiling
from opt_tree.models.canonical import check, make_canonical
from opt_tree.models.causal_lm import Buckets, CausalLM
from opt_tree.models.compiling import compile_forwards
from opt_tree.policy import OptTree
from opt_tree.tools import pair as pairs
from opt_tree.tools.presets import opt, plain

LONG = 900
CLOSE = 1e-4
"""Norms and rotations are float32 in a float64 model, too, and rounded elsewhere in a fused kernel. A row missed
or seen by mistake is off by 0.1 and more."""


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the packages that were really compiled are kept while these tests run."""
    return tmp_path_factory.mktemp("packages")


@pytest.fixture
def compiled(kept: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[CausalLM], CausalLM]:
    """Compile a model for real, or take its package. What calls the kernels is not worth the compiler's time here.

    Nor are vectors, unless rows must have the same bits wherever they stand in one.
    """
    monkeypatch.setenv("OPT_TREE_CACHE", str(kept))
    options = aot.OPTIONS | {"aot_inductor.compile_wrapper_opt_level": "O0"}

    def compiled_model(lm: CausalLM) -> CausalLM:
        monkeypatch.setattr(aot, "OPTIONS", options if lm.canonical else options | {"cpp.simdlen": 1})
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            assert compile_forwards(lm)
        assert lm.backend.name == "aot"
        return lm

    return compiled_model


def long_llama(**changes: Any) -> PreTrainedModel:
    """A tiny Llama with room for texts that outgrow the cache's first capacity, of 256 rows. The compiler's time goes
    with the number of layers.
    """
    config = ARCHITECTURES["llama"]()
    config.update({"max_position_embeddings": LONG, "num_hidden_layers": 1} | changes)
    return build(config)


def long_drafter() -> CausalLM:
    return CausalLM(perturbed(long_llama(), 0.1))


def scored(lm: CausalLM, context: list[int], rows: int) -> Tensor:
    lm.reset()
    lm.append(context)
    return lm.score(random_tree(rows, seed=rows, root=1)).logits.clone()


@pytest.mark.slow
def test_a_compiled_model_writes_the_same_text_while_its_cache_grows(compiled):
    """Plain and by trees, across two borders of the cache: one package, however large it is."""
    expected = plain(CausalLM(long_llama())).generate(prompt(240), 280).tokens
    lm = compiled(CausalLM(long_llama()))
    assert plain(lm).generate(prompt(240), 20).tokens == expected[:20] and 256 < lm.cache.capacity <= 512
    drafter = CausalLMDrafter(long_drafter(), lm.vocab)
    assert opt(lm, drafter, OptTree(9, 0.1, 4)).generate(prompt(240), 280).tokens == expected
    assert lm.cache.capacity > 512
    made = lm.backend.package.folder
    assert compiled(CausalLM(long_llama())).backend.package.folder == made, "the next one takes the same package"


@pytest.mark.slow
def test_compiled_forwards_are_canonical_among_themselves(compiled, kernel):
    """Of any number of rows: a package takes the long prefills, too. An early exit would score by eager halves."""
    lm = CausalLM(long_llama().bfloat16())
    make_canonical(lm)
    assert compiled(lm).canonical
    check(lm)
    decoder = opt(lm, CausalLMDrafter(long_drafter()), OptTree(9, 0.0))
    for seed in range(3):
        asked = prompt(20 + 5 * seed, seed)
        assert decoder.generate(asked, 24).tokens == plain(lm).generate(asked, 24).tokens
    assert lm.backend.takes(10 * aot.LARGEST)


@pytest.mark.slow
def test_compiled_logits_at_the_borders_of_the_storage(compiled):
    """Keys that are one less, as many and one more than the capacity, after garbage of an earlier text."""
    exact, lm = CausalLM(long_llama()), compiled(CausalLM(long_llama()))
    for length in (1, 2, 5, 253, 254, 255, 256, 257, 511, 512):
        for rows in (1, 2, 9):
            difference = scored(lm, prompt(length), rows) - scored(exact, prompt(length), rows)
            assert difference.abs().max() < CLOSE, (length, rows)


@pytest.mark.slow
def test_features_come_from_the_graph(compiled):
    """The last layer's are in every package; another layer's are not in the one that is there."""
    exact, lm = CausalLM(long_llama()), compiled(CausalLM(long_llama()))
    assert not lm.append(prompt(4)).features, "nothing is watched"
    for model in (exact, lm):
        model.watch((-1,))
        model.reset()
    ours, theirs = lm.append(prompt(9)).features, exact.append(prompt(9)).features
    assert ours.keys() == theirs.keys() == {-1}
    assert (ours[-1] - theirs[-1]).abs().max() < CLOSE
    with pytest.raises(ValueError, match="no layer 1"):
        lm.watch((1,))


@pytest.mark.slow
def test_a_head_is_compiled_with_the_output_layer_of_its_target(fake):
    model = build(ARCHITECTURES["llama"]())
    expected = opt(CausalLM(model), EagleDrafter(tiny_head(model), CausalLM(model)), OptTree(7, 0.0, 4))
    text = expected.generate(prompt(20), 60)
    target = CausalLM(model)
    drafter = EagleDrafter(tiny_head(model), target)
    assert compile_forwards(drafter.lm)
    found = opt(target, drafter, OptTree(7, 0.0, 4)).generate(prompt(20), 60)
    assert found.tokens == text.tokens
    assert found.accept_lengths == text.accept_lengths
    assert [step.draft_tokens for step in found.steps] == [step.draft_tokens for step in text.steps]
    with torch.no_grad():
        drafter.lm.model.get_output_embeddings().weight[0, 0] += 1
    again = CausalLM(drafter.lm.model, probe=False)
    again.watch((-1,))
    assert compile_forwards(again) and len(fake) == 2, "the target's output layer is part of the key"


@pytest.mark.slow
def test_sequences_side_by_side_run_in_the_package(compiled, monkeypatch):
    """Lanes that outgrow the first storage and are filled again, without an eager forward but of long prefills."""
    prompts = [prompt(length, seed=length) for length in (1, 30, 150, 7, 2)]
    expected = [plain(CausalLM(long_llama())).generate(ids, 40).tokens for ids in prompts]
    target, drafter = CausalLM(long_llama()), CausalLMDrafter(long_drafter(), 61)
    compiled(target)
    with monkeypatch.context() as strict:
        strict.setattr(target.eager, "forward", lambda inputs, cache: _long_only(target.eager, inputs, cache))
        for width in (3, 5):
            found = generate_batch(plain(target), prompts, 40, width=width)
            assert [one.tokens for one in found] == expected and {one.lanes for one in found} == {width}
    found = generate_batch(opt(target, drafter, OptTree(9, 0.1, 4)), prompts, 40, width=3)
    assert [one.tokens for one in found] == expected


def _long_only(eager: Packed, inputs: Inputs, cache: Any) -> Any:
    """Its forwards, which are to be of more rows than a package takes only."""
    assert inputs.numbers[0].numel() > aot.LARGEST
    return type(eager).forward(eager, inputs, cache)


@pytest.mark.slow
def test_a_compiled_pair_side_by_side(fake):
    """Both models' graphs, of one and of several kinds of layers: unequal trees, laws, features, lanes that pause."""
    decoder, prompts = decoder_of("eagle", "opt", "gemma3"), PROMPTS[:4]
    alone = trace([decoder.generate(ids, 8) for ids in prompts])
    for lm in (decoder.target, *decoder.drafter.models):
        assert compile_forwards(lm)
    assert trace(generate_batch(decoder, prompts, 8, width=3)) == alone
    assert len(fake) == 2


def test_in_a_narrow_dtype_a_row_is_compared_as_a_whole():
    """One logit may be far off by rounding; a row that is another's is a defect, one among hundreds as well."""
    lm = CausalLM(copy.deepcopy(tiny("llama")).to(torch.bfloat16))
    expected = torch.randn(300, 1000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    rounded, wrong = expected.clone(), expected.clone()
    rounded[7, 3] += 5
    wrong[7] = expected[8]
    compiling._check_close(lm, rounded, expected, "its logits")
    with pytest.raises(CompileError, match="its logits are off by"):
        compiling._check_close(lm, wrong, expected, "its logits")


@pytest.mark.slow
def test_a_copy_of_a_compiled_model_runs_its_package(compiled):
    lm = compiled(CausalLM(long_llama()))
    lm.append(prompt(9))
    again = copy.deepcopy(lm)
    tree = random_tree(5, seed=0, root=3)
    assert again.backend is not lm.backend and again.backend.name == "aot"
    assert torch.equal(again.score(tree).logits, lm.score(tree).logits)


@pytest.mark.slow
def test_a_copy_whose_package_is_gone_is_eager(compiled):
    lm = compiled(CausalLM(long_llama()))
    lm.append(prompt(9))
    blob, tree = pickle.dumps(lm), random_tree(5, seed=0, root=3)
    package = lm.backend.package.file
    kept = package.rename(package.with_suffix(".kept"))
    try:
        with pytest.warns(UserWarning, match="its compiled package is gone .*; eager until compiled again"):
            again = pickle.loads(blob)
    finally:
        kept.rename(package)
    assert again.backend.name == "eager"
    assert (again.score(tree).logits - lm.score(tree).logits).abs().max() < CLOSE


@pytest.mark.slow
def test_buckets_and_a_large_prefill(compiled):
    """A compiled model may be padded as well; a prefill above the limit goes through the eager backend."""
    exact, lm = CausalLM(long_llama()), padded_to(Buckets((1, 8), (64, 512)), compiled(CausalLM(long_llama())))
    for length, rows in [(1, 1), (63, 1), (62, 9), (300, 5)]:
        assert (scored(lm, prompt(length), rows) - scored(exact, prompt(length), rows)).abs().max() < CLOSE


@pytest.mark.quick("llama")  # which the tests below export, too
@pytest.mark.parametrize("architecture", ["gemma3", "gpt2", "llama"])
def test_exported_bodies_compute_what_eager_ones_do(architecture, fake):
    """The graph without its compiler, over two capacities."""
    exact, lm = CausalLM(tiny(architecture)), CausalLM(tiny(architecture))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert compile_forwards(lm)
    assert lm.mask_kinds == (("full_attention", "sliding_attention") if architecture == "gemma3" else ())
    lm.cache.reserve(300)
    for length, rows in [(1, 1), (40, 1), (40, 7)]:
        difference = scored(lm, prompt(length), rows) - scored(exact, prompt(length), rows)
        assert difference.abs().max() < TOLERANCE[architecture]
    assert len(fake) == 1


@pytest.mark.slow
def test_an_export_that_fails_leaves_the_model_eager_and_says_why(fake):
    lm = CausalLM(tiny("mixtral"))
    with pytest.warns(UserWarning, match=r"MixtralForCausalLM is not compiled: .*(data|guard|unbacked)") as told:
        assert not compile_forwards(lm)
    assert len(told) == 1 and "\n" not in str(told[0].message)
    assert isinstance(lm.backend, Packed) and not fake
    exact = CausalLM(tiny("mixtral"))
    assert torch.equal(scored(lm, prompt(9), 5), scored(exact, prompt(9), 5))


def _absent() -> str:
    raise InvalidCxxCompiler("g++")


@pytest.mark.slow
def test_no_compiler(fake, monkeypatch):
    """Where there is no compiler a package still runs, and without one the model stays eager."""
    with monkeypatch.context() as without:
        without.setattr("torch._inductor.cpp_builder.get_cpp_compiler", _absent)
        lm = CausalLM(tiny("llama"))
        with pytest.warns(UserWarning, match="not compiled: there is no C\\+\\+ compiler on this machine"):
            assert not compile_forwards(lm)
        assert isinstance(lm.backend, Packed)
        with monkeypatch.context() as compiler:
            compiler.setattr(aot, "cpp_compiler", lambda: "none")
            assert compile_forwards(CausalLM(tiny("llama")))
        assert compile_forwards(CausalLM(tiny("llama")))
    assert len(fake) == 1


def test_only_what_is_there(fake):
    """make=False is silent, and makes nothing."""
    lm = CausalLM(tiny("llama"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not compile_forwards(lm, make=False)
        with pytest.raises(TypeError, match="make must be True or False, got 'no'"):
            compile_forwards(lm, make="no")  # type: ignore[arg-type]
    assert not fake and isinstance(lm.backend, Packed)
    assert compile_forwards(lm) and compile_forwards(CausalLM(tiny("llama")), make=False)
    assert len(fake) == 1


def key(lm: CausalLM, **more: Any) -> Path:
    return package_of(facts_of(lm.model) | more).folder


@pytest.mark.slow
def test_whatever_decides_the_code_is_in_the_key(monkeypatch):
    here = key(CausalLM(long_llama()))
    assert here == key(CausalLM(long_llama())), "the same model again"
    changed = CausalLM(long_llama())
    with torch.no_grad():
        changed.model.model.layers[0].mlp.up_proj.weight[3, 5] += 1e-9
    other_rope = long_llama()
    other_rope.model.rotary_emb.inv_freq[1] *= 1.001
    wider = long_llama().to(torch.float32)
    eager = long_llama()
    eager.set_attn_implementation("eager")
    keys = [here, key(changed), *(key(CausalLM(model)) for model in (other_rope, wider, eager))]
    keys += [key(CausalLM(long_llama(rms_norm_eps=1e-3))), key(CausalLM(long_llama()), options={"freezing": False})]
    for name, value in [
        ("torch.__version__", "0.0"),
        ("opt_tree.backends.package_cache.transformers.__version__", "0.0"),
        ("torch.get_num_threads", lambda: 63),
        ("opt_tree.backends.package_cache.processor", lambda: "another one"),
        ("opt_tree.backends.package_cache._code_digest", lambda classes: "edited"),
    ]:
        with monkeypatch.context() as other:
            other.setattr(name, value)
            keys.append(key(CausalLM(long_llama())))
    assert len(keys) == 12 and [keys.index(one) for one in keys] == list(range(12))


@pytest.mark.slow
def test_adapters_are_compiled_and_each_state_of_theirs_has_a_package(fake):
    """To switch adapters off, or to scale one, changes no weight; a package of another state says other text."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "up_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(long_llama(), config).double().eval()
    lm, layer = CausalLM(adapted), adapted.base_model.model.model.layers[0].self_attn.q_proj
    texts = []
    for number, switch in enumerate(
        (
            lambda: None,
            adapted.base_model.disable_adapter_layers,
            adapted.base_model.enable_adapter_layers,
            lambda: layer.scale_layer(3.0),
        )
    ):
        switch()
        if number:
            with pytest.warns(UserWarning, match="other adapters at work since its forwards were compiled"):
                texts.append(plain(lm).generate(prompt(9), 12).tokens)
        assert compile_forwards(lm) and lm.backend.name == "aot"
        text = plain(lm).generate(prompt(9), 12).tokens
        assert lm.backend.name == "aot" and text == plain(CausalLM(adapted)).generate(prompt(9), 12).tokens
        assert not number or text == texts[-1]
    assert len(fake) == 3, "switched on again it is what it was"


@pytest.mark.slow
def test_an_option_and_a_layer_are_compiled_anew(fake, monkeypatch):
    model = long_llama()
    lm = CausalLM(model)
    assert compile_forwards(lm) and len(fake) == 1 and compile_forwards(CausalLM(model), make=False)
    with monkeypatch.context() as other:
        other.setattr(aot, "OPTIONS", aot.OPTIONS | {"freezing": False})
        assert not compile_forwards(CausalLM(model), make=False)
    lm.watch((-1,))
    assert len(fake) == 1, "the final hidden states are in every package"
    with pytest.warns(UserWarning, match=r"layers \[0\] are watched, which its package lacks"):
        lm.watch((0,))
    assert len(fake) == 1 and lm.backend.name == "eager"
    assert lm.append(prompt(5)).features.keys() == {0, -1}
    assert compile_forwards(lm) and len(fake) == 2 and lm.backend.name == "aot"
    exact = CausalLM(model)
    exact.watch((0, -1))
    ours, theirs = lm.append(prompt(5)).features, exact.append(prompt(5)).features
    assert ours.keys() == theirs.keys() and all((ours[k] - theirs[k]).abs().max() < 1e-9 for k in ours)


def test_a_damaged_package_is_made_again(fake):
    lm = CausalLM(tiny("llama"))
    assert compile_forwards(lm)
    package = lm.backend.package
    note = package.folder / "about.json"
    whole, about = package.file.read_bytes(), note.read_text()
    damages = [
        note.unlink,
        package.file.unlink,
        lambda: note.write_text("[]"),
        lambda: package.file.write_bytes(whole[:5]),
        lambda: package.file.write_bytes(b"x" + whole[1:]),
    ]
    for damage in damages:
        package.file.write_bytes(whole)
        note.write_text(about)
        assert package.about() is not None
        damage()
        assert package.about() is None
    assert compile_forwards(CausalLM(tiny("llama"))) and len(fake) == 2
    assert package.about() is not None


def test_a_package_that_does_not_load_is_made_again_once(fake, monkeypatch):
    def refuse(file: Path, shared: dict[str, torch.Tensor]) -> None:
        raise RuntimeError("bad library")

    monkeypatch.setattr(aot, "_load", refuse)
    lm = CausalLM(tiny("llama"))
    with pytest.warns(UserWarning, match="does not load: RuntimeError: bad library"):
        assert not compile_forwards(lm)
    assert len(fake) == 2 and isinstance(lm.backend, Packed)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda output: 1.01 * output, "its compiled logits are off by|differ from plain forwards"),
        (lambda output: output.flip(0), "its compiled logits of several lanes are off by"),
    ],
    ids=["off by a hundredth", "other lanes"],
)
def test_a_body_that_computes_something_else_is_not_used(wrong, said, fake, monkeypatch):
    good = aot._load

    def off(file: Path, shared: dict[str, torch.Tensor]) -> Callable[[list[Tensor]], list[Tensor]]:
        call = good(file, shared)
        return lambda flat: [wrong(output) for output in call(flat)]

    monkeypatch.setattr(aot, "_load", off)
    lm = CausalLM(tiny("llama"))
    with pytest.warns(UserWarning, match=said):
        assert not compile_forwards(lm)
    assert isinstance(lm.backend, Packed)


def test_offloaded_and_spread_models_stay_eager(fake):
    for spread, reason in [({"": "disk"}, "its weights are on cpu, disk"), ({"": "cpu"}, "moved by hooks")]:
        model = build(ARCHITECTURES["llama"]())
        lm = CausalLM(model)
        model.hf_device_map = spread
        model.model.layers[0]._hf_hook = object()
        with pytest.warns(UserWarning, match=reason):
            assert not compile_forwards(lm)
    assert not fake


def _write(folder: str, turn: int) -> None:
    package = Package(Path(folder))
    for index in range(20):
        made = Path(f"{folder}.{turn}.{index}")
        made.write_text(f"{turn} {index} " * 1000)
        with packages.locked(package.folder):
            package.write(made, {"by": turn})


def test_two_processes_write_one_package(tmp_path):
    """Whoever looks sees one whole package, or none while one takes the other's place; never a mixture."""
    folder = tmp_path / "package"
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_write, args=(str(folder), turn)) for turn in range(2)]
    for writer in writers:
        writer.start()
    seen = [Package(folder).about() for _ in range(50)]
    for writer in writers:
        writer.join(120)
    assert [writer.exitcode for writer in writers] == [0, 0]
    seen.append(Package(folder).about())
    assert seen[-1] is not None
    assert Package(folder).file.read_text().startswith(f"{seen[-1]['by']} ")
    assert {path.name for path in tmp_path.iterdir()} == {"package", "package.lock"}, "nothing half-made is left"


@pytest.mark.slow
def test_the_second_of_two_waits_and_takes_the_first_ones_package(fake, monkeypatch):
    """Between looking and the lock another process has made it."""
    lm = CausalLM(tiny("llama"))
    assert compile_forwards(lm)
    about = Package.about
    looks = iter([None])
    monkeypatch.setattr(Package, "about", lambda self: next(looks, about(self)))
    assert compile_forwards(CausalLM(tiny("llama"))) and len(fake) == 1


def test_the_folder_of_packages(monkeypatch, tmp_path):
    for name in ("OPT_TREE_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    assert packages.cache_folder() == Path.home() / ".cache" / "opt_tree"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert packages.cache_folder() == tmp_path / "opt_tree"
    monkeypatch.setenv("OPT_TREE_CACHE", str(tmp_path / "mine"))
    assert packages.cache_folder() == tmp_path / "mine"


def test_a_package_that_others_may_write_to_is_not_run(fake, monkeypatch):
    """Neither where it is made nor where a copy loads it again."""
    lm = CausalLM(tiny("llama"))
    assert compile_forwards(lm)
    cache = lm.backend.package.folder.parent
    cache.chmod(0o777)
    with pytest.warns(UserWarning, match=r"package is gone \(.*cache may be written to by everybody"):
        assert copy.deepcopy(lm).backend.name == "eager"
    with pytest.warns(UserWarning, match=r"is not compiled: .*cache may be written to by everybody \(mode 777\)"):
        assert not compile_forwards(CausalLM(tiny("llama")))
    assert not compile_forwards(CausalLM(tiny("llama")), make=False) and len(fake) == 1


def test_who_has_no_home_has_no_cache_and_is_told_how_to_have_one(monkeypatch, tmp_path):
    for name in ("OPT_TREE_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)  # a user that the system does not know
    assert packages.package_of({}).about() is None and packages.remembered({}) is None
    assert not packages.cache_folder().parent.parent.exists()
    (tmp_path / "file").touch()
    monkeypatch.setenv("OPT_TREE_CACHE", str(tmp_path / "file"))
    with pytest.raises(OSError, match=r"file.*; OPT_TREE_CACHE names another folder"):
        packages.package_of({}).ensure(lambda: None)


@pytest.mark.slow
def test_load_pair_compiles_both_models(fake, monkeypatch):
    asked: list[tuple[str, bool]] = []
    monkeypatch.setattr(pairs, "compile_forwards", lambda lm, make: not asked.append((lm.name, make)))
    pair = pairs.load_pair("demo", dtype="float32", compile=True)
    assert [Path(name).name for name, _ in asked] == ["target", "draft"] and all(make for _, make in asked)
    assert pair.compile(make=False) and asked[-1][1] is False


def test_a_body_is_a_function_of_its_tensors():
    """Nothing of one call is left in the next: the same storage, two texts."""
    lm = CausalLM(tiny("llama"))
    body = Body(lm.model, (-1,))
    inputs = aot.example(lm.model, lm.cache.shapes)
    with torch.no_grad():
        first = body(**inputs)
        body(**inputs | {"ints": inputs["ints"] + 1})
        again = body(**inputs)
    assert len(first) == 2 and all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_a_compiled_prompt_has_the_logits_of_its_last_row_alone(fake):
    """The output layer is much of a small model; a tree's rows have all of theirs."""
    lm = CausalLM(tiny("llama"))
    expected = lm.append(prompt(9)).logits.clone()
    assert compile_forwards(lm)
    asked, call = [], lm.backend.call
    lm.backend.call = lambda *given: asked.append(call(*given)) or asked[-1]  # type: ignore[method-assign]
    torch.testing.assert_close(lm.append(prompt(9)).logits, expected)
    lm.score(random_tree(5, seed=0, root=1))
    assert [output.logits.shape[1] for output in asked] == [1, 5]


def test_the_compiler_knows_what_it_is_told():
    """A drafter's package is not really made here, so a name that torch drops would show on a user's machine only."""
    from torch._inductor import config

    assert set(aot.OPTIONS | aot.TIMED) <= set(config.get_config_copy())


@pytest.mark.parametrize("drafts", [False, True], ids=["a target", "a draft model"])
def test_the_products_of_a_drafter_are_timed(drafts, fake, monkeypatch):
    """A few rows at a time are worth it; a target's many are not. Each is another package."""
    told: list[dict[str, Any]] = []
    write = aot._compile
    monkeypatch.setattr(aot, "_compile", lambda *given: told.append(given[2]) or write(*given))
    lm = CausalLM(tiny("llama"))
    if drafts:
        CausalLMDrafter(lm)
    assert compile_forwards(lm) and told == [aot.OPTIONS | aot.TIMED if drafts else aot.OPTIONS]
    assert compile_forwards(CausalLM(tiny("llama")), make=False) is not drafts


def test_compile_errors_are_one_line():
    assert aot.one_line(ValueError("a\n  b")) == "ValueError: a b"
    with pytest.raises(CompileError, match="no package"):
        Compiled(CausalLM(tiny("gpt2")).eager, make=False)
