"""`python -m opt_tree.advise MODEL`: the command of `opt_tree.training.advise`. The function is `opt_tree.advise`."""

from opt_tree.training.advise import main

if __name__ == "__main__":
    main()
