"""transformers models: load one, wrap it, score a tree with it."""
