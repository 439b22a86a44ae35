"""`python -m evaluation.latency`; see `evaluation.latency.command`."""

import sys

from evaluation.latency.command import main

if __name__ == "__main__":
    sys.exit(main())
