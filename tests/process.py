"""What a process needs before it runs tests, and a port. The controller of xdist runs none, and imports none of it."""

import gc
import os
import socket
import threading

import hypothesis
import torch
from tqdm import tqdm


def prepare() -> None:
    """Make this process one that tests can be run in."""
    # What imports and collection make stays: looking through it for garbage takes as long as a third of them.
    gc.disable()
    # Before the first import of opt_tree: what is imported from here on is checked at every call, shapes included.
    if os.environ.get("CHECK_SHAPES"):
        import shapes

        shapes.install()
    # tqdm's own lock is shared with forked children: one that is killed while it draws would keep it for ever.
    tqdm.set_lock(threading.RLock())
    torch.set_num_threads(1)
    hypothesis.settings.register_profile("opt_tree", deadline=None, derandomize=True, database=None, max_examples=30)
    hypothesis.settings.load_profile("opt_tree")


def free_port() -> str:
    """A port of this machine that nobody listens on."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return str(sock.getsockname()[1])
