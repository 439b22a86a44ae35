"""`python -m evaluation.replay`; see `evaluation.replay.command`."""

import sys

from evaluation.replay.command import main

if __name__ == "__main__":
    sys.exit(main())
