"""Words for what is shown. Needs the standard library alone."""


def counted(count: int, word: str) -> str:
    """So many of what a word names: 1 thread, 2 threads."""
    return f"{count} {word}{'' if count == 1 else 's'}"
