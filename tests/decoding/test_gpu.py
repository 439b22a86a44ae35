"""On a CUDA device: the same verdicts and texts as on the CPU, and how often the host waits for the device."""

import functools
import warnings

import pytest
import torch
from tiny_models import ARCHITECTURES, VOCAB, build, padded_to, perturbed, prompt, random_tree, tiny_head

from opt_tree.decoder import Decoder
from opt_tree.draft_model import CausalLMDrafter
from opt_tree.drafter import Drafter
from opt_tree.methods.drafters.heads.eagle import EagleDrafter
from opt_tree.methods.policies.static import Static
from opt_tree.methods.sampling import Sampling
from opt_tree.models.causal_lm import Buckets, CausalLM
from opt_tree.policy import OptTree

pytestmark = pytest.mark.gpu

PROMPT = prompt(46)
NEW_TOKENS = 16
POLICY = OptTree(nodes=12, threshold=0.1, max_depth=5)
BUCKETS = Buckets(rows=(1, 8, 32), keys=(64, 128))
CONFIGURATIONS = ["llama", "qwen3-window", "mistral", "gemma2", "gemma3", "gpt2", "opt"]


@functools.cache
def decoder(architecture: str, device: str, kind: str = "draft", buckets: Buckets | None = None) -> Decoder:
    """A float32 pair of the same weights on either device."""
    model = build(ARCHITECTURES[architecture](), dtype=torch.float32)
    draft, head = perturbed(model, 0.1).to(device), tiny_head(model).to(device)
    target = CausalLM(model.to(device))
    drafter: Drafter = EagleDrafter(head, target) if kind == "eagle" else CausalLMDrafter(CausalLM(draft), VOCAB)
    return padded_to(buckets, Decoder(target, drafter, POLICY))


@pytest.fixture(autouse=True)
def exact_products() -> None:
    """float32 products in float32: TF32 has ten bits and flips choices."""
    torch.backends.cuda.matmul.allow_tf32 = False


DRAWN = Sampling(temperature=0.8, top_p=0.9)


@pytest.mark.parametrize(
    ("architecture", "sampling"),
    [*((name, Sampling()) for name in CONFIGURATIONS), ("llama", DRAWN), ("gemma2", DRAWN)],
    ids=lambda value: value if isinstance(value, str) else "sampled" if value.temperature else "greedy",
)
def test_texts_and_verdicts_are_those_of_the_cpu(architecture, sampling):
    results = [decoder(architecture, device).generate(PROMPT, NEW_TOKENS, sampling) for device in ("cpu", "cuda")]
    assert results[0].tokens == results[1].tokens
    for ours, theirs in zip(results[0].steps, results[1].steps, strict=True):
        assert ours.path == theirs.path
        assert ours.tree.tokens.tolist() == theirs.tree.tokens.tolist()


@pytest.mark.parametrize("kind", ["draft", "eagle"])
@pytest.mark.parametrize("architecture", ["llama", "mistral", "gemma3"])
def test_padded_mode_gives_the_same_text(architecture, kind):
    expected = decoder(architecture, "cpu").generate(PROMPT, NEW_TOKENS).tokens
    assert decoder(architecture, "cuda", kind, BUCKETS).generate(PROMPT, NEW_TOKENS).tokens == expected


@pytest.mark.parametrize("architecture", CONFIGURATIONS)
def test_padding_is_exact_to_rounding(architecture):
    model = build(ARCHITECTURES[architecture](), dtype=torch.float32).to("cuda")
    logits = []
    for buckets in (None, BUCKETS):
        lm = padded_to(buckets, CausalLM(model))
        lm.append(PROMPT)
        logits.append(lm.score(random_tree(9, seed=1, root=4)).logits.clone())
    assert (logits[0] - logits[1]).abs().max() < 1e-4


@pytest.mark.parametrize("architecture", CONFIGURATIONS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_rounding_is_not_taken_for_an_ignored_mask(architecture, dtype):
    CausalLM(build(ARCHITECTURES[architecture](), dtype=dtype).to("cuda"))


def synchronisations(steps: object) -> int:
    """Run one step of a decoding and count how often the host waited for the device."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            next(steps)  # type: ignore[call-overload]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing CUDA operation" in str(warning.message) for warning in caught)


def test_plain_decoding_waits_once_a_step():
    target = decoder("llama", "cuda").target
    steps = Decoder(target, None, Static.empty()).steps(PROMPT, NEW_TOKENS)
    next(steps)
    for _ in range(5):
        assert synchronisations(steps) == 1


@pytest.mark.parametrize("kind", ["draft", "eagle"])
def test_how_often_a_step_waits(kind):
    """The choice of the target is one wait, and the children of a draft layer are one."""
    steps = decoder("llama", "cuda", kind).steps(PROMPT, NEW_TOKENS)
    next(steps)
    for _ in range(5):
        before = decoder("llama", "cuda", kind).drafter.work.forwards
        waits = synchronisations(steps)
        layers = decoder("llama", "cuda", kind).drafter.work.forwards - before
        assert layers > 0 and 1 <= waits <= layers + 1
