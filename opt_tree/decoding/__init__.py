"""The loop, and what is built straight on it."""
