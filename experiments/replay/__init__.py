"""Is `--nodes auto` as good as the best fixed setting? `python -m experiments.replay`."""
