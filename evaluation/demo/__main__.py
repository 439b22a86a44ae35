"""`python -m evaluation.demo --drafter SPEC`; see `evaluation.demo.command`."""

import sys

from evaluation.demo.command import main

if __name__ == "__main__":
    sys.exit(main())
