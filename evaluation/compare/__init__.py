"""Which tree and which verifier are best: `python -m evaluation.compare`."""
