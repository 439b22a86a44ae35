"""`python -m opt_tree.advise MODEL`: the command of `opt_tree.training.advise`. The function is `opt_tree.advise`."""

import runpy

if __name__ == "__main__":
    runpy.run_module("opt_tree.training.advise", run_name="__main__")
