"""How long things take on this machine, and the budget that suits it: `python -m evaluation.latency`."""
