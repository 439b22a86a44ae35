"""What decodes side by side as it does alone: methods, models, and how a batch is compared with its prompts alone."""

import itertools

from tiny_models import VOCAB, padded_to, prompt, tiny, tiny_drafter, tiny_head

from opt_tree import generate_batch
from opt_tree.decoder import Decoder
from opt_tree.draft_model import CausalLMDrafter
from opt_tree.drafter import Drafter
from opt_tree.generation import Generation
from opt_tree.methods.drafters.heads.eagle import EagleDrafter
from opt_tree.methods.policies.dyspec import DySpec
from opt_tree.methods.policies.eagle2 import Eagle2
from opt_tree.methods.policies.sampled import Sampled
from opt_tree.methods.policies.static import Static
from opt_tree.methods.sampling import Sampling
from opt_tree.methods.verifiers.multi_round_rejection import multi_round
from opt_tree.methods.verifiers.recursive_rejection import without_replacement
from opt_tree.methods.verifiers.traversal_verification import traversal
from opt_tree.models.causal_lm import Buckets, CausalLM
from opt_tree.policy import OptTree
from opt_tree.tools.presets import plain
from opt_tree.verify import match

OPT = OptTree(nodes=12, threshold=0.1, max_depth=5)
TREES = {
    "opt": (OPT, match, Sampling()),
    "eagle2": (Eagle2(3, 3, 9), match, Sampling()),
    "binary": (Static.kary(2, 3), match, Sampling()),
    "match": (OPT, match, Sampling(0.8, top_p=0.9)),
    "dyspec": (DySpec(nodes=8), without_replacement, Sampling(1.0)),
    "chains": (Sampled.chains(2, 3), multi_round, Sampling(1.0)),
    "traversal": (Sampled.chains(2, 3), traversal, Sampling(1.0)),
}
METHODS = [("plain", "opt"), *itertools.product(("draft", "eagle"), TREES)]
ARCHITECTURES = ("llama", "mistral", "gemma3")
BUCKETS = (None, Buckets(rows=(1, 8, 32), keys=(64, 128)))
PLACES = list(itertools.product(ARCHITECTURES, BUCKETS))
PROMPTS = [prompt(length, seed=length) for length in (1, 30, 11, 47, 2, 5, 18)]


def decoder_of(drafter: str, tree: str = "opt", architecture: str = "llama", buckets: Buckets | None = None) -> Decoder:
    """A decoder of tiny models: plain, with a sharpened draft model ("draft"), or with a head ("eagle")."""
    policy, verifier, _ = TREES[tree]
    target = CausalLM(tiny(architecture))
    if drafter == "plain":
        return padded_to(buckets, plain(target))
    if drafter == "eagle":
        drafts: Drafter = EagleDrafter(tiny_head(tiny(architecture)), target)
    else:
        drafts = CausalLMDrafter(CausalLM(tiny_drafter(architecture)), VOCAB).calibrated(0.7)
    return padded_to(buckets, Decoder(target, drafts, policy, verifier))


def trace(answers: list[Generation]) -> list[tuple]:
    """All that must agree between a batch and its prompts one by one: texts, ends, paths and what was run for them."""
    return [
        (
            answer.tokens,
            answer.finish_reason,
            answer.accept_lengths,
            [(step.path, step.draft_forwards, step.draft_tokens) for step in answer.steps],
        )
        for answer in answers
    ]


def compare(decoder: Decoder, sampling: Sampling, prompts: list[list[int]], widths: tuple[int, ...], new: int) -> None:
    """Raise AssertionError where a batch gives what its prompts do not give alone; each has a seed of its own."""
    alone = trace([decoder.generate(ids, new, sampling, seed=seed) for seed, ids in enumerate(prompts)])
    for width in widths:
        found = trace(generate_batch(decoder, prompts, new, sampling, seed=range(len(prompts)), width=width))
        assert found == alone, f"width {width}"
