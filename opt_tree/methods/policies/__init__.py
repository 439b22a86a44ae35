"""Tree policies beside OPT-Tree: which nodes to draft, which to verify."""
