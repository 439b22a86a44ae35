"""`python -m evaluation.compare`; see `evaluation.compare.command`."""

import sys

from evaluation.compare.command import main

if __name__ == "__main__":
    sys.exit(main())
