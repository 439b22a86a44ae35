"""How files of block drafters become drafters: what each layout leaves open is tried out, copies are not kept."""

from functools import partial
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

from opt_tree.drafter import Drafter
from opt_tree.methods.drafters.draft_vocabulary import take_vocabulary
from opt_tree.methods.drafters.heads.block_files import (
    COLUMNS,
    LAWS,
    BlockFile,
    asked_for,
    block_tensors,
    law_of,
    read_block_file,
)
from opt_tree.methods.drafters.heads.block_network import RawEmbedding, Scores, block_network
from opt_tree.methods.drafters.heads.blocks import Block, BlockDrafter
from opt_tree.methods.drafters.heads.eagle import LAST
from opt_tree.methods.drafters.heads.eagle3_files import NAMED
from opt_tree.methods.drafters.heads.eagle_head import take_biases
from opt_tree.methods.drafters.heads.families import BLOCKS, DSPARK, refuse_others
from opt_tree.methods.drafters.heads.layer_probe import Convention, probe
from opt_tree.methods.drafters.heads.published_files import read_head
from opt_tree.methods.drafters.registry import DrafterOptions, feature_target, register
from opt_tree.models.capabilities import cast_weights
from opt_tree.models.causal_lm import CausalLM
from opt_tree.models.chain_lm import AnyLM
from opt_tree.models.checkpoints import load_named, read_config, refused
from opt_tree.models.quantised_layers import linear_of, rows_of

_RULE = "its layout's rule"


def load_block(path: str, target: AnyLM, options: DrafterOptions, families: tuple[str, ...] = BLOCKS) -> BlockDrafter:
    """Load a block drafter as transformers, z-lab, SpecForge, ModelOpt, DeepSpec or `speculators` write it.

    Weights come to the target's dtype and device. An embedding and an output layer of its own are used where they are
    not the target's. CheckpointError names what is no part of such a model, in one line. Where a layout leaves open
    which states it reads, or which row speaks first, both are tried (`layer_probe.py`); `describe` says what was found.
    """
    target, raw = feature_target(target), read_config(path, "a block drafter")
    refuse_others(path, raw, families)
    with refused(f"cannot use {path}"):
        # Before its weights are read: a folder of something else may be large.
        count = int(target.model.config.get_text_config().num_hidden_layers)
        file = asked_for(read_block_file(raw, count), options.layers, count)
        tensors = block_tensors(path, read_head(path))
        said = file.own.get("vocab_size") if file.published else None
        if said not in (None, target.vocab):
            raise ValueError(f"it is for {said} tokens, {target.name} has {target.vocab}")
        block = _read_block(file, tensors, target)
        drafter = BlockDrafter(block, target)
        if target.ranks is None:
            _settle(drafter, file, options)
        return drafter


def _settle(drafter: BlockDrafter, file: BlockFile, options: DrafterOptions) -> None:
    """Take the conventions by which a drafter agrees more with its target, if clearly more; else those of its layout.

    Which row speaks first is asked before which states it reads: each with the answer so far to the other.
    """
    found, shifted = [], file.reading.layers(not file.reading.entered) or ()
    if not file.told:
        rows = (file.first, 1 - file.first)
        tries = [Convention(f"laws from row {row}", partial(drafter.best, drafter.block.layers, row)) for row in rows]
        found.append(probe(drafter.target, drafter.block.layers, tries, options.tokenizer, _RULE))
        drafter.block.first = rows[found[-1].taken]
    if not file.reading.told and min(shifted) >= 0:
        both = (drafter.block.layers, _features(shifted, file, drafter.target))
        names = (NAMED[file.reading.entered], NAMED[not file.reading.entered])
        tries = [
            Convention(name, partial(drafter.best, layers, drafter.block.first))
            for name, layers in zip(names, both, strict=True)
        ]
        found.append(probe(drafter.target, (*both[0], *both[1]), tries, options.tokenizer, _RULE))
        drafter.block.layers = both[found[-1].taken]
    drafter.probed, drafter.features = tuple(found), tuple(dict.fromkeys(drafter.block.layers))


def _read_block(file: BlockFile, tensors: dict[str, Tensor], target: CausalLM) -> Block:
    """Make a block of a file and its tensors. ValueError names every tensor that is missing, unknown or misshapen."""
    tokens = _in_order(tensors, take_vocabulary(tensors, target.vocab))
    columns = target.vocab if tokens is None else len(tokens)
    lendable = ("embed_tokens", "lm_head") if file.published else ()
    lent = {name: tensors.pop(f"{name}.weight", None) for name in lendable}
    law = law_of(file, tensors, target.vocab, columns)
    own = {} if law is None else {name: tensors.pop(name) for name in [*tensors] if name.startswith(tuple(LAWS))}
    layers = _features(file.reading.layers() or (), file, target)
    model = block_network(file.config, len(layers) * target.hidden, file.convolution)
    take_biases(model, tensors)
    load_named(model, tensors, f"it is not the block of a {file.family} model of this config")
    if law is not None:
        load_named(law, own, f"it has not the laws of a {file.family} model of this config")
        law = cast_weights(law, target.device, target.dtype).eval().requires_grad_(False)
    cast_weights(model, target.device, target.dtype).eval().requires_grad_(False)
    block = Block(model, layers, file.first, law, tokens, file.sights, family=file.family)
    if file.published:
        block.embed = RawEmbedding(
            _embedding_of(lent["embed_tokens"], target), float(file.own.get("input_embedding_scale") or 1)
        )
        block.scores = Scores(_output_of(lent["lm_head"], target, tokens), file.scaling)
    return block


def _in_order(tensors: dict[str, Tensor], tokens: Int[Tensor, " columns"] | None) -> Int[Tensor, " columns"] | None:
    """Return a draft vocabulary in rising order, and put the rows of the tensors that have one for each token so."""
    if tokens is None or bool((tokens.diff() > 0).all()):
        return tokens
    order = tokens.argsort()
    for name in COLUMNS:
        if name in tensors and len(tensors[name]) == len(order):
            tensors[name] = tensors[name][order]
    return tokens[order]


def _embedding_of(tensor: Tensor | None, target: CausalLM) -> nn.Module:
    """Return a file's own embedding, or the target's where it has none or a copy of it."""
    lent: Any = target.model.get_input_embeddings()
    if tensor is None or torch.equal(tensor := tensor.to(lent.weight.device, lent.weight.dtype), lent.weight):
        return lent
    return nn.Embedding.from_pretrained(tensor)


def _output_of(tensor: Tensor | None, target: CausalLM, tokens: Int[Tensor, " columns"] | None) -> nn.Module:
    """Return a file's own output layer, or the target's rows of its tokens where it has none or a copy of them."""
    layer: Any = target.model.get_output_embeddings()
    lent: Any = layer if tokens is None else rows_of(layer, tokens)
    if tensor is None:
        return lent
    own = linear_of(tensor.to(target.device, target.dtype), None)
    return lent if type(lent) is nn.Linear and lent.bias is None and torch.equal(own.weight, lent.weight) else own


def _features(layers: tuple[int, ...], file: BlockFile, target: CausalLM) -> tuple[int, ...]:
    """The target's features that are the outputs of these layers, the last one's as the file's layout has it."""
    last = int(target.model.config.get_text_config().num_hidden_layers) - 1
    return tuple(LAST if layer == last and file.normed else layer for layer in layers)


@register(
    "dflash",
    about="a DFlash, DFlash 2, JetSpec, DSpark or Domino model, one pass a draft; which, its files tell",
    paper="2602.06036",
    part="dflash",
)
def _load(path: str, target: AnyLM, options: DrafterOptions) -> Drafter:
    return load_block(path, target, options)


@register(
    "dspark",
    about="a DSpark model, whose laws know the parent's token or the path, and nothing else",
    paper="2607.05147",
    part="dspark",
)
def _load_dspark(path: str, target: AnyLM, options: DrafterOptions) -> Drafter:
    return load_block(path, target, options, (DSPARK,))
