"""How the embedded models were made, from the corpora to the checkpoints: run once, kept to be run again."""
