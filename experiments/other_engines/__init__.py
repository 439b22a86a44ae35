"""The same model and prompts in other people's engines, beside this library: `python -m experiments.other_engines`."""
