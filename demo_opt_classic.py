"""OPT-Tree with an independent draft model: `python demo_opt_classic.py` decodes with the embedded pair, on any CPU.

`python demo_opt_classic.py --help` lists what else it can be told.
"""

import sys

from evaluation.demo.options import main

if __name__ == "__main__":
    sys.exit(main())
