"""Teach a language model not to repeat itself: unlikelihood training on its own greedy answers (arXiv:1908.04319).

    python -m experiments.embedded_family.unlikelihood --model DIR --own DIR --output DIR

Small models decoded greedily fall into loops. The next token of an answer is unwanted where it completes an n-gram that
the answer already had; its probability is pushed down by -log(1 - p), beside the ordinary loss on the corpus.
"""

import sys

from experiments.embedded_family.plans import Schedule, training_parser
from opt_tree.training.command_line import TrainingParser, command, existing, model_path


def new_parser() -> TrainingParser:
    schedule = Schedule(rows="1:512", lr=5e-4, warmup=10, save_steps=50)
    parser = training_parser("Teach a language model not to repeat itself.", schedule)
    parser.add_argument("--model", type=model_path, required=True, help="model folder, with its tokenizer")
    parser.add_argument("--own", type=existing, required=True, help="folder of the model's own outputs")
    parser.add_argument("--order", type=int, default=6, help="length of the n-grams that must not come twice")
    return parser


main = command(new_parser, "experiments.embedded_family.unlikelihood:train")

if __name__ == "__main__":
    sys.exit(main())

import argparse

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.data import Dataset

from experiments.embedded_family.lm import save_model, set_attention
from experiments.embedded_family.outputs import load_documents
from experiments.embedded_family.stream import Blocks
from experiments.embedded_family.tokenizer import ASSISTANT
from experiments.embedded_family.trainer import Examples, Loss, fit_as_told, load_examples
from opt_tree.models.checkpoints import load_tokenizer, load_weights
from opt_tree.training.answers import TokenDocuments


def repeats(document: np.ndarray, assistant: int, order: int) -> np.ndarray:
    """Return a mask of the answer's tokens that complete an `order`-gram seen earlier in the answer.

    With order 2 and the answer `a b c a b d`: only the second `b` is marked. The answer is all that follows the first
    `assistant` token: a model may loop on that one too.
    """
    mask = np.zeros(len(document), dtype=bool)
    start = int(np.flatnonzero(document == assistant)[0]) + 1
    seen: set[tuple[int, ...]] = set()
    for end in range(start + order, len(document) + 1):
        gram = tuple(document[end - order : end].tolist())
        mask[end - 1] = gram in seen
        seen.add(gram)
    return mask


class Contrast(Dataset[dict[str, Tensor]]):
    """Corpus rows to be learnt (`labels`) beside rows of own answers whose `unwanted` tokens are to be unlearnt.

    An item holds as many tokens of either kind; own rows have no labels, corpus rows nothing unwanted.
    """

    def __init__(self, corpus: Blocks, own: TokenDocuments, assistant: int, order: int) -> None:
        masks = [repeats(own[index], assistant, order) for index in range(len(own))]
        looping = [index for index, mask in enumerate(masks) if mask.any()]
        if not looping:
            raise ValueError(f"none of the {len(own)} own answers repeats a {order}-gram: nothing to unlearn")
        self.corpus = corpus
        self.tokens = np.concatenate([own[index] for index in looping])
        self.masks = np.concatenate([masks[index] for index in looping])

    def __len__(self) -> int:
        return len(self.corpus)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        learnt = self.corpus[index]["input_ids"]
        places = np.arange(index * learnt.numel(), (index + 1) * learnt.numel()) % len(self.tokens)
        own = torch.from_numpy(self.tokens[places].astype(np.int64)).view_as(learnt)
        unwanted = torch.from_numpy(self.masks[places]).view_as(learnt)
        return {
            "input_ids": torch.cat([learnt, own]),
            "labels": torch.cat([learnt, torch.full_like(own, -100)]),
            "unwanted": torch.cat([torch.zeros_like(unwanted), unwanted]),
        }


def unlikelihood_loss(logits: Float[Tensor, "rows length vocab"], inputs: dict[str, Tensor]) -> Float[Tensor, ""]:
    """Return the cross-entropy of the labels plus the mean -log(1 - p) of the unwanted tokens, if any."""
    logits = logits[:, :-1].float()
    loss = F.cross_entropy(logits.flatten(0, 1), inputs["labels"][:, 1:].flatten())
    if "unwanted" not in inputs:
        return loss
    unwanted = inputs["unwanted"][:, 1:]
    log_probs = logits.log_softmax(-1).gather(-1, inputs["input_ids"][:, 1:, None]).squeeze(-1)
    # A certain token has 1 - p = 0: the clamp keeps its logarithm and its gradient finite.
    pushed = -torch.log((1 - log_probs.exp()).clamp_min(1e-6)) * unwanted
    return loss + pushed.sum() / unwanted.sum().clamp_min(1)


def make_loss(compiled: bool) -> Loss:
    """Return the loss of a batch; held-out batches, which have nothing unwanted, get the cross-entropy alone."""
    distance = torch.compile(unlikelihood_loss) if compiled else unlikelihood_loss

    def loss(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
        return distance(model(input_ids=inputs["input_ids"], use_cache=False).logits, inputs)

    return loss


def train(args: argparse.Namespace) -> None:
    tokenizer = load_tokenizer(str(args.model))
    examples = load_examples(args, tokenizer, 0.5)
    assistant = tokenizer.convert_tokens_to_ids(ASSISTANT)
    contrast = Contrast(examples.train, load_documents(args.own), assistant, args.order)
    model = load_weights(str(args.model), torch.float32)
    set_attention(model, args.compile)
    loss = make_loss(args.compile)
    if fit_as_told(args, model, Examples(contrast, examples.heldout), loss):
        save_model(model, tokenizer, args.output / "final")
