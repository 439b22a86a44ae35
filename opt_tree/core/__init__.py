"""The nouns that everybody speaks: trees, pools, targets, steps, sampling, randomness. Imports nothing else here."""
