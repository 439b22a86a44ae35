"""Batches of the documents that `opt_tree.training.heads.features` left on disk, and their draft vocabulary.

Owns which documents are trained on and which are held out.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from opt_tree.errors import counted
from opt_tree.training.heads.features import FeatureFile, load_part, neighbours

Group = tuple[int, int, int]
"""Documents of a batch: the part, the first of them, and the one behind the last."""


@dataclass(frozen=True)
class Batch:
    """Documents of like length, padded on the right."""

    ids: Int[Tensor, "rows length"]
    judged: Bool[Tensor, "rows length"]
    """Tokens whose follower belongs to the answer: where the target's law is asked for."""
    features: dict[int, Float[Tensor, "rows length hidden"]]
    layers: tuple[int, ...]
    """The layers that were asked for, in this order; a small target may have one of them twice."""


class Documents:
    """The parts of a folder as batches; of the first part every fourth is held out."""

    def __init__(self, folder: Path, tokens: int, layers: Sequence[int]) -> None:
        self.folder, self.layers = folder, tuple(layers)
        self.parts, groups = list[FeatureFile](), list[Group]()
        for number, path in enumerate(sorted(folder.glob("part-*.safetensors"))):
            self.parts.append(part := load_part(path))
            if missing := set(self.layers) - part.features.keys():
                raise ValueError(f"{path} has no hidden states of layers {sorted(missing)}")
            groups += [(number, *ends) for ends in neighbours(part.starts.diff().tolist(), tokens)]
        if not self.parts:
            raise ValueError(f"no features (part-*.safetensors) in {folder}")
        self.heldout = [group for group in groups if group[0] == 0][::4]
        self.train = [group for group in groups if group not in self.heldout]
        if not self.train:
            raise ValueError(f"{folder} holds one batch, which is held out: it takes more answers or fewer --tokens")

    def size(self, layer: int) -> float:
        """Return the root mean square of a layer's states: the median over the tokens of the first part."""
        return self.parts[0].features[layer].float().square().mean(-1).sqrt().median().item()

    def __getitem__(self, group: Group) -> Batch:
        part, first, last = self.parts[group[0]], group[1], group[2]
        lengths, rows = part.starts[first : last + 1].diff(), slice(part.starts[first], part.starts[last])

        def pad(tensor: Tensor) -> Tensor:
            return nn.utils.rnn.pad_sequence(tensor[rows].split(lengths.tolist()), batch_first=True)

        place = torch.arange(int(lengths.max()))[None]
        judged = (place >= part.answers[first:last, None] - 1) & (place < lengths[:, None])
        features = {layer: pad(part.features[layer]) for layer in dict.fromkeys(self.layers)}
        return Batch(pad(part.tokens).long(), judged, features, self.layers)


def most_frequent(counts: Int[np.ndarray, " vocab"], count: int, whose: str) -> Int[Tensor, " count"]:
    """Return the tokens that are most frequent, sorted by id; ValueError if `whose` vocabulary has not so many."""
    if not 1 <= count <= len(counts):
        raise ValueError(f"a draft vocabulary of {count} tokens, where the {whose} has {len(counts)}")
    kept = np.sort(np.argsort(-counts, kind="stable")[:count])
    print(f"draft vocabulary of {counted(count, 'token')}: {counts[kept].sum() / counts.sum():.2%} of the answers")
    return torch.from_numpy(kept)
