"""The code of `demo_opt_classic.py` and `demo_opt_eagle.py`."""
