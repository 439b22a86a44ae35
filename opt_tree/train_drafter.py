"""`python -m opt_tree.train_drafter MODEL --output DIR`: the command of `opt_tree.training.train_drafter`."""

import runpy

if __name__ == "__main__":
    runpy.run_module("opt_tree.training.train_drafter", run_name="__main__")
