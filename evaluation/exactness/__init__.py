"""Why two answer files differ: `python -m evaluation.exactness`."""
