"""Train heads that draft every layer in one pass: Medusa's (arXiv:2401.10774), or residual ones behind an EAGLE head.

    python -m opt_tree.training.heads.one_pass --target DIR --own DIR --output DIR --kind medusa
    python -m opt_tree.training.heads.one_pass --target DIR --own DIR --output DIR --kind residual --eagle eagle:demo

The target is frozen, and so is the EAGLE head. Head d learns what the target itself says d tokens ahead, along its own
answers: a law of its own for each depth, given the root alone. All read through the target's output layer; a share of
the positions, drawn anew for every batch, is judged. Drafters that are trained for it with mask tokens or a shared
hidden state are others: ParallelSpec (arXiv:2410.05589), P-EAGLE (arXiv:2602.01469).
"""

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from opt_tree.core.command_line import from_fields
from opt_tree.drafters.draft_vocabulary import vocabulary_tensors
from opt_tree.drafters.heads.eagle import EagleDrafter
from opt_tree.drafters.heads.eagle_head import EagleHead
from opt_tree.drafters.heads.one_pass import MedusaHeads
from opt_tree.drafters.heads.residual import ResidualHeads
from opt_tree.drafters.registry import load_drafter
from opt_tree.models.causal_lm import CausalLM
from opt_tree.models.checkpoints import load_tensors, load_tokenizer
from opt_tree.training.answers import documents, files_of
from opt_tree.training.command_line import Parser, fit_as_told, run_command
from opt_tree.training.embedded_family.distil import distillation_loss, load_lesson, teacher_parser
from opt_tree.training.files import write_checkpoint
from opt_tree.training.heads.batches import most_frequent
from opt_tree.training.trainer import Loss, Schedule


@dataclass(frozen=True)
class Objective:
    """What is trained, and what the loss weighs."""

    depths: int = 5  # layers of a draft; the first is the EAGLE head's own where there is one
    inner: int = 256  # width of residual heads inside
    hard: float = 0.5  # share of the target's argmax in the cross-entropy
    judged: float = 0.06  # share of the positions that are judged
    decay: float = 0.8  # weight of each depth relative to the one before
    columns: int = 0  # tokens that residual heads draft, the most frequent ones of the answers; 0: all


class Heads(nn.Module):
    """Heads together with their objective: `forward` is the loss of a batch."""

    def __init__(self, heads: MedusaHeads | ResidualHeads, target: PreTrainedModel, objective: Objective) -> None:
        super().__init__()
        self.heads, self.objective = heads, objective
        self._target = [target]  # in a list, so that its weights are not saved with the heads

    def forward(
        self, inputs: tuple[Float[Tensor, "rows length hidden"], ...], goals: Float[Tensor, "rows length hidden"]
    ) -> Float[Tensor, ""]:
        """Return the mean distance over depths; position i of the inputs belongs to the root at token i.

        `goals` are the states that the target's output layer reads: at token i + d - 1 it says what depth d should.
        """
        told = 2 if isinstance(self.heads, ResidualHeads) else 1
        last = goals.shape[1] - self.objective.depths + 1
        count = max(1, round(self.objective.judged * last * len(goals)))
        rows = torch.randint(len(goals), (count,), device=goals.device)
        places = torch.randint(last, (count,), device=goals.device)
        states = self.heads(*(states[rows, places].float() for states in inputs))
        output: Any = self._target[0].get_output_embeddings()
        total, weights = torch.zeros((), device=goals.device), 0.0
        for depth, ours in enumerate(states, told):
            theirs = goals[rows, places + depth - 1]
            drafted, wanted = (x.to(output.weight.dtype) @ output.weight.T for x in (ours, theirs))
            weight = self.objective.decay ** (depth - told)
            total = total + weight * distillation_loss(drafted, wanted, self.objective.hard)
            weights += weight
        return total / weights


def make_loss(target: PreTrainedModel, eagle: EagleHead | None, compiled: bool) -> Loss:
    """Return the loss on a batch of token rows; the root at token i comes behind the feature of token i - 1."""
    body = torch.compile(target.base_model) if compiled else target.base_model

    def loss(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
        ids: Int[Tensor, "rows length"] = inputs["input_ids"]
        with torch.no_grad():
            features = body(input_ids=ids, use_cache=False).last_hidden_state
            given = (features[:, :-1],)
            if eagle is not None:
                positions = torch.arange(ids.shape[1] - 1, device=ids.device)[None]
                (estimates,) = eagle(ids[:, 1:], features[:, :-1], positions)
                given = (estimates, target.get_input_embeddings()(ids[:, 1:]), features[:, :-1])
        return model(given, features[:, 1:])

    return loss


def save_heads(
    heads: MedusaHeads | ResidualHeads,
    config: dict[str, Any],
    folder: Path,
    vocabulary: Mapping[str, Tensor] = MappingProxyType({}),
) -> None:
    """Save heads in bf16: Medusa's in the published layout, without output layers of their own."""
    module = heads.heads if isinstance(heads, MedusaHeads) else heads
    write_checkpoint(config, module.state_dict() | dict(vocabulary), folder)


def draft_vocabulary(own: Path, tokenizer: PreTrainedTokenizerBase, columns: int) -> Mapping[str, Tensor]:
    """Return the tensors of the draft vocabulary: the tokens that are most frequent in the answers."""
    counts = np.zeros(len(tokenizer), np.int64)
    for file in files_of([own]):
        for _, answer in documents(file, tokenizer):
            counts += np.bincount(answer, minlength=len(counts))
    return vocabulary_tensors(most_frequent(counts, columns, "target"), len(counts))


def new_parser() -> Parser:
    parser = teacher_parser("Train heads that draft in one pass.", Schedule(rows="0.9:512,0.1:2048"), Objective())
    parser.add_argument("--kind", choices=("medusa", "residual"), default="residual", help="which heads")
    parser.add_argument("--eagle", default="eagle:demo", help="spec of the EAGLE head that residual heads stand behind")
    return parser


def train(args: argparse.Namespace) -> None:
    objective, eagle = from_fields(Objective, args), None
    vocabulary: Mapping[str, Tensor] = {}
    if objective.columns:
        if args.kind == "medusa":
            raise ValueError("--columns is of residual heads: Medusa's draft all tokens")
        vocabulary = draft_vocabulary(args.own, load_tokenizer(str(args.target)), objective.columns)
    target, _, examples = load_lesson(args)
    text = target.config.get_text_config()
    heads: MedusaHeads | ResidualHeads
    if args.kind == "medusa":
        heads = MedusaHeads(text.hidden_size, text.vocab_size, objective.depths, own_output=False)
        config = {"medusa_num_heads": objective.depths, "medusa_num_layers": 1}
    else:
        drafter = load_drafter(args.eagle, CausalLM(target)).bare
        if not isinstance(drafter, EagleDrafter):
            raise ValueError(f"--eagle {args.eagle} is no EAGLE-1/2 head")
        eagle = drafter.lm.model.base_model
        heads = ResidualHeads(text.hidden_size, objective.depths, objective.inner)
        config = {"depths": objective.depths, "inner": objective.inner, "eagle": args.eagle}
    if args.init:
        (heads.heads if isinstance(heads, MedusaHeads) else heads).load_state_dict(load_tensors(str(args.init)))
    model = Heads(heads.float(), target, objective)
    if fit_as_told(args, model, examples, make_loss(target, eagle, args.compile)):
        save_heads(heads, config, args.output / "final", vocabulary)


if __name__ == "__main__":
    run_command(new_parser(), train)
