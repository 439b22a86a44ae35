"""Models by name: a few public ones that a short word stands for, and GGUF files, as folders that transformers loads.

Owns where the weights of a known model come from (`download`) and the copy in the user's cache (`gguf`). What
"smollm2" means is `opt_tree.models.known`'s. Importing it touches neither the network nor the disk.
"""

from opt_tree.models.known import KNOWN, Known, drafter_of, drafters_of
from opt_tree.models.named.places import cached, check_model, fetch, folder_of, resolve

__all__ = ["KNOWN", "Known", "cached", "check_model", "drafter_of", "drafters_of", "fetch", "folder_of", "resolve"]
