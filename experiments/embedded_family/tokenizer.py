"""Train the byte-level BPE tokenizer of the demo models and give it a chat template.

python -m experiments.embedded_family.tokenizer --output DIR [--data DIR] [--vocab 8192]
"""

import sys
from pathlib import Path

from experiments.embedded_family.plans import add_data, corpus_names
from opt_tree.training.command_line import TrainingParser, command


def new_parser() -> TrainingParser:
    parser = TrainingParser("Train the demo models' tokenizer.")
    add_data(parser)
    parser.add_argument("--output", type=Path, required=True, help="folder of the tokenizer")
    parser.set_defaults(replaces=True)
    parser.add_argument("--vocab", type=int, default=8192, help="tokens, specials included")
    return parser


main = command(new_parser, "experiments.embedded_family.tokenizer:write")

if __name__ == "__main__":
    sys.exit(main())

import argparse
from collections.abc import Iterator

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from experiments.embedded_family.data import read_corpus
from opt_tree.system.files import whole

BOS, EOS, USER, ASSISTANT, PAD = "<|begin|>", "<|end|>", "<|user|>", "<|assistant|>", "<|pad|>"
SPECIALS = [BOS, EOS, USER, ASSISTANT, PAD]
MAX_LENGTH = 2048
# <|begin|><|user|>question<|end|><|assistant|>answer<|end|>...; a system message opens the next user turn.
CHAT_TEMPLATE = (
    "{{- bos_token -}}{%- set held = namespace(system='') -%}"
    "{%- for message in messages -%}"
    "{%- if message['role'] == 'system' -%}{%- set held.system = held.system + message['content'] + '\n\n' -%}"
    "{%- elif message['role'] == 'user' -%}"
    "{{- '<|user|>' + held.system + message['content'] + eos_token -}}{%- set held.system = '' -%}"
    "{%- elif message['role'] == 'assistant' -%}{{- '<|assistant|>' + message['content'] + eos_token -}}"
    "{%- else -%}{{- raise_exception('unknown role: ' + message['role']) -}}{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)


def training_texts(folder: Path) -> Iterator[str]:
    """Yield the training side of every corpus: all of chat, every fourth piece of prose (most of the bytes)."""
    for name in corpus_names(folder):
        for index, document in enumerate(read_corpus(folder, name)):
            if document.split == "heldout":
                continue
            if document.messages:
                yield from (message["content"] for message in document.messages)
            elif index % 4 == 0 and document.text:
                yield document.text


def train_tokenizer(texts: Iterator[str], vocab: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE of `vocab` tokens, specials included; digits are never merged."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab, special_tokens=SPECIALS, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        additional_special_tokens=[USER, ASSISTANT],
        chat_template=CHAT_TEMPLATE,
        model_max_length=MAX_LENGTH,
        clean_up_tokenization_spaces=False,
    )


def write(args: argparse.Namespace) -> None:
    """Train the tokenizer on a corpus folder and save it."""
    least = len(SPECIALS) + 256  # every byte is a token
    if args.vocab < least:
        raise ValueError(f"--vocab must be at least {least}, got {args.vocab}")
    with whole(args.output) as partial:
        train_tokenizer(training_texts(args.data), args.vocab).save_pretrained(partial)
