"""Verifiers beside `greedy` and `match`: what survives of a scored tree, and what comes next."""
