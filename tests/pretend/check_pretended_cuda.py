"""The library on a pretended CUDA device: texts, waits and graphs. Run by tests/backends/test_pretended_cuda.py.

In a process of its own, with `-p pretend.plugin`, beside the tests that are marked `gpu`.
"""

import copy
import json
import warnings
from functools import partial
from itertools import islice
from typing import Any

import pytest
import torch
from backends.test_table_tensors import store_of
from methods.drafters.test_blocks import dspark_of
from methods.drafters.test_mtp import model_at, publish, small_numbers
from tiny_models import ARCHITECTURES, CONTEXT, build, drawn, perturbed, prompt, random_tree, tiny_head

import opt_tree
from evaluation import eval_opt_eagle
from evaluation.demo import __main__ as demo
from evaluation.demo.options import Options as DemoOptions
from evaluation.timing import interleave
from examples import chat
from experiments import gpu_first_light as first_light
from opt_tree import generate_batch
from opt_tree.backends.captured_step import CapturedStep
from opt_tree.draft_model import CausalLMDrafter
from opt_tree.methods.drafters.combined.grafted import Grafted
from opt_tree.methods.drafters.heads.blocks import BlockDrafter
from opt_tree.methods.drafters.heads.eagle import EagleDrafter
from opt_tree.methods.drafters.heads.one_pass import MedusaDrafter, MedusaHeads
from opt_tree.methods.drafters.tables.store import StoreDrafter
from opt_tree.methods.recorder import Recorder
from opt_tree.methods.sampling import Sampling
from opt_tree.models.causal_lm import Buckets, CausalLM
from opt_tree.models.compiling import captured_shapes, compile_forwards, warm_up
from opt_tree.policy import OptTree
from opt_tree.tools import step_costs
from opt_tree.tools.on_device import on_device
from opt_tree.tools.presets import PRESETS, make_preset, plain
from opt_tree.tools.step_costs import auto
from pretend import device as pretended
from pretend import graphs, waits
from pretend.device import logged
from pretend.waits import DRAFTERS, counted, measure, measure_on_device, pair_with

BUCKETS = Buckets((1, 8, 32), (64, 128))
POLICY = OptTree(nodes=12, threshold=0.1, max_depth=5)
DRAWN = Sampling(temperature=0.8, top_p=0.9)
CLOSE = 1e-5
"""Rounding: norms and rotations are float32 in a float64 model, too. A law that is off by a hundredth is further."""
TABLES = ("store", "ngram", "recycling")


@pytest.fixture(autouse=True)
def few(monkeypatch):
    """Steps that are counted, layers of their trees; calls before a capture, which choose nothing here. Each costs what
    it costs on a CPU.
    """
    monkeypatch.setattr(waits, "STEPS", 2)
    monkeypatch.setattr(waits, "POLICY", OptTree(nodes=60, threshold=0.2, max_depth=4))
    monkeypatch.setattr(waits, "BUCKETS", Buckets((8, 64), (512,)))
    monkeypatch.setattr("opt_tree.backends.cuda_graphs._WARM_UPS", 1)


def decoder(device: str, kind: str, architecture: str = "llama") -> opt_tree.Decoder:
    model = build(ARCHITECTURES[architecture](), dtype=torch.float64)
    draft, head = perturbed(model, 0.1).to(device), tiny_head(model).to(device)
    target = CausalLM(copy.deepcopy(model).to(device))
    if kind == "eagle":
        return opt_tree.Decoder(target, EagleDrafter(head, target), POLICY)
    if kind == "block":
        block = dspark_of(target, markov_head_type="rnn").block
        block.model.to(device), block.law.to(device)
        return opt_tree.Decoder(target, BlockDrafter(block, target), POLICY)
    if kind == "heads and a store":
        heads = MedusaDrafter(drawn(MedusaHeads(target.hidden, target.vocab, 2)).to(device), target)
        return opt_tree.Decoder(target, Grafted(heads, StoreDrafter(store_of(), (30.0, 3.0, 1.0))), POLICY)
    return opt_tree.Decoder(target, CausalLMDrafter(CausalLM(draft), target.vocab), POLICY)


def captured(kind: str, architecture: str = "llama") -> opt_tree.Decoder:
    made = decoder("cuda", kind, architecture)
    for lm in (made.target, *made.drafter.models):
        assert compile_forwards(lm, buckets=BUCKETS)
    return made


def same(one: Any, other: Any) -> None:
    assert one.tokens == other.tokens and one.accept_lengths == other.accept_lengths
    for mine, theirs in zip(one.steps, other.steps, strict=True):
        assert mine.tree.tokens.tolist() == theirs.tree.tokens.tolist(), "also the nodes, in their order"
        assert mine.tree.path_log_probs == pytest.approx(theirs.tree.path_log_probs, abs=CLOSE)


@pytest.mark.parametrize("architecture, sampling", [("llama", DRAWN), ("qwen3-window", Sampling())])
def test_texts_and_trees_of_a_head_are_those_of_the_cpu(architecture, sampling):
    """Of a draft model: tests/decoding/test_gpu.py."""
    same(*(decoder(device, "eagle", architecture).generate(prompt(20), 12, sampling) for device in ("cuda", "cpu")))


UNTRAINED = {name for name, method in PRESETS.items() if method.part is None}


@pytest.mark.parametrize("preset", sorted({*UNTRAINED, "opt", "chain", "kary", "eagle2", "sequoia:8"}))
def test_presets(preset):
    texts = []
    for device in ("cpu", "cuda"):
        made = decoder(device, "draft")
        ready = make_preset(preset, made.target, made.drafter)
        texts.append(ready.generate(prompt(20), 7, DRAWN, seed=1).tokens)
    assert len(texts[0]) == len(texts[1])
    if not any(policy.children.sampled for policy in ready.policy.policies):
        assert texts[0] == texts[1]


@pytest.mark.parametrize("name", sorted(DRAFTERS))
def test_every_drafter_waits_once_a_layer_and_once_a_step(name):
    pair = pair_with(DRAFTERS[name])
    found = measure(pair, apart=False)
    # One forward drafts a block; the Markov head then reads the parents of each place.
    layers = pair.drafter.rows if name == "dspark" else found.layers
    assert found.waits <= layers + 1
    assert name not in TABLES or found.waits == 1


@pytest.mark.parametrize("name", ["lm", "eagle", "recycling"])
def test_a_sampled_verdict_is_read_once_as_well(name):
    found = measure(pair_with(DRAFTERS[name]), DRAWN, apart=False)
    assert found.waits <= found.layers + 2


@pytest.mark.parametrize("name, sampling", [*((name, Sampling()) for name in waits.ON_DEVICE), ("lm", DRAWN)])
def test_a_step_on_the_device_is_read_once_and_sent_once(name, sampling):
    """Beside looks at flags, which come behind the launch of another layer."""
    found = measure_on_device(pair_with(DRAFTERS[name]), sampling)
    assert found.idle == 1 and found.uploads == 1 and found.waits <= max(found.layers, 1)
    assert found.waits > 1 or name not in ("lm", "eagle", "eagle3")


@pytest.mark.parametrize("kind", ["draft", "eagle"])
def test_steps_on_the_device_are_those_of_a_cpu(kind):
    """Nothing of the host and the device is mixed."""
    device = on_device(decoder("cuda", kind))
    same(device.generate(prompt(20), 12), decoder("cpu", kind).generate(prompt(20), 12))
    assert device.taken["device"] >= device.taken.total() - 1 > 0


@pytest.fixture
def happened(monkeypatch) -> list[str]:
    """Launches of steps, replays and reads, in order."""
    found: list[str] = []
    launch, note = CapturedStep.launch, pretended.note
    monkeypatch.setattr(CapturedStep, "launch", lambda *given: (found.append("launch"), launch(*given))[1])

    def noted(*what: Any) -> None:
        if what[0] == "reads" or "graph replay" in what:
            found.append("read" if what[0] == "reads" else "replay")
        note(*what)

    monkeypatch.setattr(pretended, "note", noted)
    return found


def check_order(happened: list[str], ahead: int, layers: list[int]) -> None:
    """Each of so many steps is begun before the one before it is read; a flag is read when the layer behind it is
    launched; nothing else is read.

    `layers`: how many each step has launched, where it could stop; 1: it is one graph.
    """
    steps = happened[happened.index("launch") :]
    expected, begun = ["launch", *["replay"] * min(layers[0], 2)], ["launch", *["replay"] * min(layers[0], 2), "read"]
    for count in layers[:ahead]:
        if count > 1:
            stopped = count < POLICY.max_depth
            expected += [*["read", "replay"] * (count - 2), *["read"] * stopped, "replay"]
        expected += begun
    assert ahead > 2 and steps[: len(expected)] == expected, happened


@pytest.mark.parametrize("kind, architecture, sampling", [("draft", "gemma3", DRAWN), ("eagle", "llama", Sampling())])
def test_captured_steps_are_those_of_a_cpu(kind, architecture, sampling, happened):
    """From the second step of a shape on, each is replayed; the keys outgrow a bucket; the next text has graphs."""
    device, here = on_device(captured(kind, architecture)), decoder("cpu", kind, architecture)
    same(device.generate(prompt(20), 32, sampling), here.generate(prompt(20), 32, sampling))
    before, work = graphs.counts["replays"], device.target.work
    happened.clear()
    found = device.generate(prompt(18, seed=3), 26, sampling, seed=2)
    host = here.generate(prompt(18, seed=3), 26, sampling, seed=2)
    same(found, host)
    layers = [step.draft_forwards for step in found.steps]
    layers[0] -= 1  # the prompt's
    check_order(happened, device.ahead, layers)
    known = [min(step.draft_forwards + 1, POLICY.max_depth) for step in host.steps]
    assert layers[: device.ahead] == known[: device.ahead] and min(known) < POLICY.max_depth in known
    assert graphs.counts["replays"] > before and device.target.work.forwards - work.forwards == len(found.steps) + 1
    told = [one.generate(prompt(18, seed=3), 16, sampling, seed=2, recorder=Recorder(2)) for one in (device, here)]
    assert told[0].log_probs == pytest.approx(told[1].log_probs, abs=CLOSE) and not device.ahead


@pytest.mark.parametrize("kind", ["block", "heads and a store"])
def test_captured_steps_of_one_pass_and_of_tables_are_those_of_a_cpu(kind, monkeypatch, happened):
    """A text outgrows its places; the next one has the same graphs; other weights have others."""
    monkeypatch.setattr("opt_tree.tools.table_tensors._LEAST_PLACES", 8)
    device, here = on_device(captured(kind)), decoder("cpu", kind)
    same(device.generate(prompt(20), 12), here.generate(prompt(20), 12))
    known, before = device._step._replays, graphs.counts["replays"]
    happened.clear()
    same(device.generate(prompt(18, seed=3), 26), here.generate(prompt(18, seed=3), 26))
    check_order(happened, device.ahead, [1] * device.ahead)
    assert device._step._replays is known and graphs.counts["replays"] > before + 2
    for one in (device, here):
        head = one.drafter.block.law.markov_head if kind == "block" else one.drafter.drafter.heads.heads[0][0]
        made = head.joint_proj if kind == "block" else head.linear
        for name, weight in list(made.named_parameters(recurse=False)):
            setattr(made, name, torch.nn.Parameter(weight.detach() * 1.5))
    same(device.generate(prompt(20), 8), here.generate(prompt(20), 8))
    assert device._step._replays is not known


@pytest.mark.parametrize("name", ["eagle", "parallelspec", "dspark", "graft"])
def test_a_captured_step_is_one_launch_and_one_read(name):
    """Beside the replay, what brings its tensors to their places; a layer more is its replay, and a flag to read."""
    found = measure_on_device(pair_with(DRAFTERS[name], captured=True), DRAWN)
    assert found.idle == 0 and found.uploads == 1 and found.draft_launches <= 10 + 2 * (found.layers - 1), found
    assert found.waits == 1 if name != "eagle" else 1 < found.waits <= found.layers


def test_a_capture_moves_no_cache():
    """A step is launched twice for it, each time behind the context."""
    made = captured("draft")
    steps = on_device(opt_tree.Decoder(made.target, made.drafter, OptTree(60, 0.1, 6))).steps(prompt(20), 60)
    next(steps)
    before, versions = graphs.counts["captures"], [lm.cache.storage_version for lm in made.drafter.models]
    list(islice(steps, 3))
    assert graphs.counts["captures"] > before
    assert versions == [lm.cache.storage_version for lm in made.drafter.models]


@pytest.mark.parametrize("change", ["weights", "layers", "room", "scale"])
def test_a_captured_step_is_dropped_when_what_it_holds_has_changed(change):
    device, here, long = on_device(captured("draft")), decoder("cpu", "draft"), prompt(40)
    device.generate(long, 12)  # its prefill is in no bucket, so that a forward does not notice before a step does
    accept, read = device.drafter.accept, list[set[int]]()
    if change == "weights":
        for lm in (device.target, here.target):
            layer = lm.model.model.layers[0].mlp.down_proj
            layer.weight = torch.nn.Parameter(layer.weight.detach() * 1.5)
    elif change == "layers":
        device.target.watch((0,))
        device.drafter.accept = lambda outcome: (read.append(set(outcome.features)), accept(outcome))[1]
    elif change == "room":
        device.target.cache.reserve(4 * device.target.cache.capacity)
    else:
        device.drafter.calibrated(0.5), here.drafter.calibrated(0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # new weights are computed eagerly first
        same(device.generate(long, 12), here.generate(long, 12))
    assert change != "layers" or (len(read) > 2 and all(layers == {0} for layers in read))


def test_a_copy_captures_its_own():
    device = on_device(captured("draft"))
    device.generate(prompt(20), 12)
    before = graphs.counts["captures"]
    same(copy.deepcopy(device).generate(prompt(20), 12), decoder("cpu", "draft").generate(prompt(20), 12))
    assert graphs.counts["captures"] > before


def test_a_graph_that_says_something_else_is_not_taken(monkeypatch):
    """A warning says so, and the text is right."""
    replay = graphs.Graph.replay

    def wrong(graph: Any) -> None:
        replay(graph)
        for func, _, results in graph.operations[-20:]:
            if func is torch.ops.aten.cat.default and results[0].ndim == 1:  # what the host reads
                results[0].add_(1)

    monkeypatch.setattr(graphs.Graph, "replay", wrong)
    device = on_device(captured("draft"))
    with pytest.warns(UserWarning, match="layers is not captured: .*says something else than its kernels"):
        found = device.generate(prompt(20), 12)
    same(found, decoder("cpu", "draft").generate(prompt(20), 12))


LAUNCHES = {"lm": 6, "eagle": 10}
"""Of a captured draft layer: the replay, and what brings its inputs to their places."""


@pytest.mark.parametrize("name", sorted(LAUNCHES))
def test_a_captured_draft_layer_is_one_replay(name):
    """Forward, log-probabilities and the best tokens: nothing else of a layer depends on the model."""
    found = measure(pair_with(DRAFTERS[name], captured=True))
    assert found.waits <= found.layers + 1
    assert found.draft_launches <= LAUNCHES[name] * found.layers + 2


def test_no_key_is_copied_for_grouped_queries(monkeypatch):
    """In float32 the logits are those of eager attention, which copies them."""
    monkeypatch.setattr("transformers.integrations.sdpa_attention.repeat_kv", None)
    logits = []
    for attention in ("sdpa", "eager"):
        model = build(ARCHITECTURES["llama"](), dtype=torch.float32)
        model.set_attn_implementation(attention)
        lm = CausalLM(model.to("cuda"))
        lm.append(prompt(20))
        logits.append(lm.score(random_tree(9, seed=1, root=4)).logits.cpu())
    assert model.config.num_key_value_heads < model.config.num_attention_heads
    assert (logits[0] - logits[1]).abs().max() < 1e-5 * logits[1].abs().max()


def test_an_mtp_layer_waits_once_a_layer_of_the_tree(tmp_path, monkeypatch):
    small_numbers(monkeypatch)
    folder = publish(tmp_path, "deepseek_v3", 1)
    target = CausalLM(model_at(folder, torch.float32, "batched_mm", device_map={"": "cuda"}))
    ready = opt_tree.Decoder(target, opt_tree.load_drafter("mtp", target), OptTree(60, 0.0, 5))
    layers, log = counted(ready, prompt(20), Sampling())
    assert log.waits / waits.STEPS <= layers + 1
    texts = (each.generate(prompt(20), 12).tokens for each in (ready, plain(target)))
    assert next(texts) == next(texts)


def test_plain_decoding_uploads_two_tensors_a_step():
    steps = plain(decoder("cuda", "draft").target).steps(prompt(20), 20)
    next(steps)
    with logged() as log:
        next(steps)
    assert log.waits == 1 and log.uploads.total() <= 2


@pytest.mark.parametrize("sampling", [Sampling(), DRAWN], ids=["greedy", "sampled"])
def test_log_probs_are_read_once_at_the_end(sampling):
    made, found, late = decoder("cuda", "draft"), [], []
    made.generate(prompt(20), 8, sampling)  # the first text makes a few tables
    for asked in (None, Recorder(), Recorder(3)):
        with logged() as log:
            found.append(made.generate(prompt(20), 8, sampling, recorder=asked))
        late.append(log.waits)
    assert late == [late[0], late[0] + 1, late[0] + 1]
    expected = decoder("cpu", "draft").generate(prompt(20), 8, sampling, recorder=Recorder(3))
    assert found[2].log_probs == pytest.approx(expected.log_probs) and found[1].log_probs == found[2].log_probs
    assert [list(place) for place in found[2].top_log_probs] == [list(place) for place in expected.top_log_probs]


def test_a_batch_and_a_kept_context():
    made, here = decoder("cuda", "draft"), decoder("cpu", "draft")
    prompts = [prompt(20), prompt(13, seed=3), prompt(20, seed=4)]
    both = [generate_batch(one, prompts, 12, width=2) for one in (made, here)]
    assert [one.tokens for one in both[0]] == [one.tokens for one in both[1]]
    first = made.generate(prompts[0], 8)
    longer = [*prompts[0], *first.tokens]
    assert made.generate(longer, 8, reuse=True).tokens == here.generate(longer, 8).tokens


@pytest.mark.parametrize(
    "architecture, kind", [*((name, "draft") for name in ("llama", "gemma3", "gpt2", "mistral")), ("llama", "eagle")]
)
def test_replayed_graphs_decode_the_same(architecture, kind):
    """Every replay spoils what the other graphs of the pool left; a graph reads no host and no memory given back.

    Texts would be the same by laws that are a little off. So laws are compared: the drafter's, and the target's logits.
    """
    graphs.counts.clear()
    made, eager = captured(kind, architecture), decoder("cpu", kind, architecture)
    same(made.generate(prompt(20), 12), eager.generate(prompt(20), 12))
    assert graphs.counts["replays"]
    logits = []
    for lm in (made.target, eager.target):
        lm.reset()
        lm.append(prompt(20))
        before = graphs.counts["replays"]
        logits.append(lm.score(random_tree(8, seed=1, root=4)).logits.cpu())
        assert graphs.counts["replays"] == before + (lm is made.target)
    torch.testing.assert_close(*logits, rtol=CLOSE, atol=CLOSE)


def test_a_shape_that_cannot_be_captured_runs_kernel_by_kernel(monkeypatch):
    made = captured("draft")
    expected = decoder("cpu", "draft").generate(prompt(20), 12).tokens

    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("opt_tree.backends.cuda_graphs.warm_up", full)
    made.target.backend._calls.clear()
    with pytest.warns(UserWarning, match="run kernel by kernel: they cannot be captured: .*CUDA out of memory"):
        assert made.generate(prompt(20), 12).tokens == expected
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # said once
        assert made.generate(prompt(20), 12).tokens == expected


@pytest.mark.filterwarnings("ignore:.*is not compiled")
def test_a_refused_model_is_as_before():
    """Eager experts ask on the host which of them got any token."""
    lm = CausalLM(build(ARCHITECTURES["mixtral"]()).to("cuda"))
    assert not compile_forwards(lm) and lm.buckets is None


ROPES: dict[str, dict[str, Any]] = {
    "llama3": {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64},
    "linear": {},
    "yarn": {"original_max_position_embeddings": CONTEXT // 2},
    # It asks on the host whether the longest position so far has been passed.
    "dynamic": {},
}


@pytest.mark.filterwarnings("ignore:.*is not compiled.*reads at")
@pytest.mark.parametrize("kind", ROPES)
def test_rotations_that_ask_the_host_nothing_are_captured(kind):
    config = ARCHITECTURES["llama"]()
    config.rope_parameters = {"rope_theta": 10000.0, "rope_type": kind, "factor": 2.0} | ROPES[kind]
    assert compile_forwards(CausalLM(build(config).to("cuda")), buckets=BUCKETS) == (kind != "dynamic")


def test_shapes_are_captured_beforehand():
    made = captured("draft")
    models = [made.target, *made.drafter.models]
    for lm in models:
        shapes = captured_shapes(lm, POLICY.nodes, 90)
        assert list(warm_up(lm, shapes)) == shapes == [(r, k) for r in (1, 8, 32) for k in (64, 128)]
    before = graphs.counts["captures"]
    assert made.generate(prompt(20), 20).tokens == decoder("cpu", "draft").generate(prompt(20), 20).tokens
    assert graphs.counts["captures"] == before


def test_a_compiled_pair(monkeypatch):
    few = partial(compile_forwards, buckets=Buckets((1, 16), (512,)))
    monkeypatch.setattr("opt_tree.tools.pair.compile_forwards", few)
    pair = opt_tree.load_pair("demo", dtype="float32", device="cuda", compile=True)
    assert {lm.backend.name for lm in (pair.target, *pair.drafter.models)} == {"captured"}
    question = pair.encode("Why is the sky blue?")
    here = opt_tree.load_pair("demo", dtype="float32")
    policy = OptTree(nodes=8, threshold=0.2)
    texts = [opt_tree.Decoder(one.target, one.drafter, policy).generate(question, 6).tokens for one in (pair, here)]
    assert texts[0] == texts[1]
    monkeypatch.undo()
    pair.compile(make=False)
    assert pair.target.buckets == Buckets((1, 16), (512,)), "a model keeps those that it has"


def test_costs_are_measured_on_the_device(tmp_path, monkeypatch):
    monkeypatch.setenv("OPT_TREE_CACHE", str(tmp_path))
    for name, few in (("ROUNDS", 1), ("SIZES", (0, 1, 4)), ("CONTEXTS", (8,))):
        monkeypatch.setattr(step_costs, name, few)
    made = decoder("cuda", "draft")
    measured = opt_tree.Decoder(made.target, made.drafter, auto(made.target, made.drafter))
    assert measured.generate(prompt(20), 8).tokens == decoder("cpu", "draft").generate(prompt(20), 8).tokens


SMALL = ["--dtype", "float32", "--nodes", "8", "--threshold", "0.2"]


def test_a_demo_writes_what_it_writes_on_the_cpu(monkeypatch, capsys):
    """By every method that it compares, transformers' among them."""
    kept = []
    monkeypatch.setattr(demo, "interleave", lambda *args: kept.append(interleave(*args)) or kept[-1])
    words = [*SMALL, "--prompt", "Why is the sky blue?", "--max-new-tokens", "4"]
    words += ["--rounds", "1", "--eager"]
    for device in ("cpu", "cuda"):
        assert demo.main([*words, "--device", device], DemoOptions) == 0, capsys.readouterr().err
    texts = [[timings.texts(method) for method in sorted(timings.runs)] for timings in kept]
    assert texts[0] == texts[1] and all(text == texts[0][0] for text in texts[0])


def test_an_evaluation_answers_what_it_answers_on_the_cpu(tmp_path):
    turns = []
    for device in ("cpu", "cuda"):
        file = tmp_path / f"{device}.jsonl"
        words = [*SMALL, "--bench-name", "demo", "--question-end", "1", "--max-new-tokens", "6", "--device", device]
        assert eval_opt_eagle.main([*words, "--answer-file", str(file)]) == 0
        turns.append([json.loads(line)["choices"][0]["turns"] for line in file.read_text().splitlines()])
    assert turns[0] == turns[1] and turns[0]


def test_the_chat_page_s_two_sides_write_the_same():
    pair = pair_with("eagle:demo")
    room = chat.Room("demo", pair, {"eagle:demo": pair.drafter})
    sides = room.runners([{"role": "user", "content": "What is a fox?"}], chat.Chosen("eagle:demo", length=5))
    assert list(chat.race(sides)) and sides[0].tokens == sides[1].tokens


def test_a_first_gpu_s_command_runs_on_it(tmp_path, monkeypatch):
    """The parts that ask the device for something of their own, with small sizes."""
    monkeypatch.setattr(first_light.Place, "new_tokens", 4)
    written = tmp_path / "first"
    options = ["--dry-run", "--parts", "machine,budgets", "--output", str(written)]
    assert first_light.main(options) == 0
    parts = json.loads(written.with_suffix(".json").read_text())["parts"]
    assert parts["machine"]["rows"] and len(parts["budgets"]["rows"]) == 7
