"""Train a small Llama-architecture language model, from scratch or on from `--init`, with a loss on every token.

    python -m experiments.embedded_family.lm --tokenizer DIR --output DIR [--layers 12 --hidden 256 ...]
    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 -m experiments.embedded_family.lm ...    # a process a core

Stopped runs go on from the last checkpoint in OUTPUT with `--resume`. The finished model lies in OUTPUT/final (bf16).
"""

import sys

from experiments.embedded_family.plans import Schedule, Shape, training_parser
from opt_tree.training.command_line import TrainingParser, command, model_path


def new_parser() -> TrainingParser:
    parser = training_parser("Train a small language model.", Schedule())
    parser.add_argument("--tokenizer", type=model_path, required=True, help="tokenizer folder")
    parser.add_argument("--init", type=model_path, help="continue from this model instead of from scratch")
    parser.add_fields(Shape())
    return parser


main = command(new_parser, "experiments.embedded_family.lm:train")

if __name__ == "__main__":
    sys.exit(main())

import argparse
import json
from pathlib import Path

import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from experiments.embedded_family.trainer import fit_as_told, load_examples
from opt_tree.models.checkpoints import load_tokenizer, load_weights
from opt_tree.system.command_line import from_fields
from opt_tree.system.files import whole

SHARD = "15MB"  # files of a published model stay under 16 MiB


def new_llama(shape: Shape, tokenizer: PreTrainedTokenizerBase) -> LlamaForCausalLM:
    """Return a randomly initialised model with tied embeddings and the positions that the tokenizer allows."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=tokenizer.model_max_length,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)


def set_attention(model: PreTrainedModel, compiled: bool) -> None:
    """Choose the faster attention: on a CPU, compiled plain attention beats the fused kernel (2950 to 2350 tok/s)."""
    model.set_attn_implementation("eager" if compiled and not torch.cuda.is_available() else "sdpa")


def save_model(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Save a model in bf16 with its tokenizer and its stop token as generation config."""
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    model.config.use_cache = True  # the Trainer had switched it off
    with whole(folder) as partial:
        model.to(torch.bfloat16).save_pretrained(partial, max_shard_size=SHARD)
        tokenizer.save_pretrained(partial)
        # As one line the file is half as large as with the indentation that save_pretrained writes.
        tokenizer.backend_tokenizer.save(str(partial / "tokenizer.json"), pretty=False)
        settings = json.loads((partial / "tokenizer_config.json").read_text())
        settings = {
            name: value for name, value in settings.items() if name not in ("backend", "is_local", "local_files_only")
        }
        settings["tokenizer_class"] = "PreTrainedTokenizerFast"  # the name that transformers 4 knows too
        (partial / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def new_model(args: argparse.Namespace, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """Return the model to train: the one in `args.init`, or a new one of the shape that `args` describe."""
    model = load_weights(str(args.init), torch.float32) if args.init else new_llama(from_fields(Shape, args), tokenizer)
    set_attention(model, args.compile)
    return model


def train(args: argparse.Namespace) -> None:
    tokenizer = load_tokenizer(str(args.tokenizer))
    examples = load_examples(args, tokenizer, 0.8)
    model = new_model(args, tokenizer)
    if fit_as_told(args, model, examples):
        save_model(model, tokenizer, args.output / "final")
        print(f"done; to make a drafter for it: opt-tree train-drafter {args.output / 'final'} --output FOLDER")
