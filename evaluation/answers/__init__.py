"""Answer files: how they are written and read, what a line holds, and the arithmetic over lines."""
