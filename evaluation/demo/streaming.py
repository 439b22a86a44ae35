"""An answer as it comes: a transformers streamer for the library's loop, coloured by who proposed each token."""

import os
from typing import TextIO

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from opt_tree.display import IncrementalText, paint


def wants_color(stream: TextIO) -> bool:
    """Whether a stream is a terminal that takes colours (https://no-color.org)."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


class ColorStreamer:
    """A transformers streamer for the library's loop: accepted draft tokens in colour or in brackets, as they come.

    The loop hands over one step at a time, and its last token is the target's own. (Only a stop token inside an
    accepted path ends a step otherwise, and it is not shown.)
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, out: TextIO, color: bool) -> None:
        self._text, self._out, self._color = IncrementalText(tokenizer), out, color
        self._begun = False

    def put(self, value: Tensor) -> None:
        """Show one step's tokens; the first call brings the prompt, which is not shown."""
        if not self._begun:
            self._begun = True
            return
        *drafted, own = [self._text.add(token) for token in value.tolist()]
        self._out.write(paint("".join(drafted), True, self._color) + own)
        self._out.flush()

    def end(self) -> None:
        """Show what was held back, and what the marks mean."""
        legend = paint("drafted and accepted", True, self._color) + " the target's own"
        self._out.write(f"{self._text.rest()}\n\n({legend})\n\n")
        self._out.flush()
