"""What is said when memory has run out: how much was asked for, how much there is, and what needs less."""

import re
import sys
from typing import Any

import psutil


def out_of_memory(error: BaseException) -> str | None:
    """Say in one line how much memory was asked for, how much there is, and what needs less; None for another error."""
    text = str(error)
    torch: Any = sys.modules.get("torch")  # what has not been imported has asked for nothing
    on_device = torch is not None and isinstance(error, torch.OutOfMemoryError)
    asked = re.search(r"(?:tried|unable) to allocate ([\d.]+ ?\w+)", text, flags=re.IGNORECASE)
    if not (isinstance(error, MemoryError) or on_device or (asked and "can't allocate memory" in text)):
        return None
    amount = asked[1] if asked else "an array"
    if amount.endswith(" bytes"):
        amount = f"{int(amount.removesuffix(' bytes')) / 1e9:.2f} GB"
    if on_device:
        free = re.search(r"GPU \d+ has a total capacity of .*? is free", text)
        there = free[0] if free else "the device has no room for it"
    else:
        memory, own = psutil.virtual_memory(), psutil.Process().memory_info().rss
        there = (
            f"this process has {own / 1e9:.1f} GB, and {memory.available / 1e9:.1f} of the machine's "
            f"{memory.total / 1e9:.1f} GB are free"
        )
    less = "a smaller model, bfloat16, fewer nodes, a shorter context and fewer lanes at a time"
    return f"out of memory: {amount} more were asked for; {there}. What needs less: {less}"
