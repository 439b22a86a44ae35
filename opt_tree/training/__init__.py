"""Training of small target models, drafters and EAGLE heads: what the demo models of this package were made with.

Owns the corpus format, the held-out split, packing, and one command each for a tokenizer, a language model, a distilled
drafter and an EAGLE head. Nothing in the decoding library imports this package.
"""
