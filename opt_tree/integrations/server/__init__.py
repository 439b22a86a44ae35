"""An OpenAI-compatible server over a pair: `opt-tree serve`."""
