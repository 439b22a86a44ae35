"""`python -m evaluation.peers`; see `evaluation.peers.command`."""

import sys

from evaluation.peers.command import main

if __name__ == "__main__":
    sys.exit(main())
