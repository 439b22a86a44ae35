"""Several sequences in one forward."""
