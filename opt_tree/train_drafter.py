"""`python -m opt_tree.train_drafter MODEL --output DIR`: the command of `opt_tree.training.train_drafter`."""

from opt_tree.training.train_drafter import main

if __name__ == "__main__":
    main()
