"""`python -m evaluation.report`; see `evaluation.report.command`."""

import sys

from evaluation.report.command import main

if __name__ == "__main__":
    sys.exit(main())
