"""OPT-Tree with an EAGLE head: `python demo_opt_eagle.py` decodes with the embedded target and head, on any CPU.

`python demo_opt_eagle.py --help` lists what else it can be told.
"""

import sys

from evaluation.demo.options import EagleOptions, main

if __name__ == "__main__":
    sys.exit(main(kind=EagleOptions))
