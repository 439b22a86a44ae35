"""What answer files say of speed and acceptance: `python -m evaluation.report`."""
