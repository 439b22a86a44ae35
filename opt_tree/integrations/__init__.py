"""Ways in from other libraries: `generate()` of transformers, the published interface, lm-eval."""
