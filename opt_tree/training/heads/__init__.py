"""Training of drafting heads from hidden states."""
