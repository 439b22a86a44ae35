"""`python -m evaluation.gpu_first_light`; see `evaluation.gpu_first_light.command`."""

import sys

from evaluation.gpu_first_light.command import main

if __name__ == "__main__":
    sys.exit(main())
