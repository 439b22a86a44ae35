"""`python -m evaluation.exactness`; see `evaluation.exactness.command`."""

import sys

from evaluation.exactness.command import main

if __name__ == "__main__":
    sys.exit(main())
