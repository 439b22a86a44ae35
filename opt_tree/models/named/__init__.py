"""Models by name: a few public ones that a short word stands for, and GGUF files, as folders that transformers loads.

Owns what "smollm2" means (`known`), where its weights come from (`sources`) and the copy in the user's cache
(`converted`). Importing it touches neither the network nor the disk.
"""

from opt_tree.models.named.known import KNOWN, Known, drafter_of, drafters_of
from opt_tree.models.named.places import cached, check_target, fetch, folder_of, resolve

__all__ = ["KNOWN", "Known", "cached", "check_target", "drafter_of", "drafters_of", "fetch", "folder_of", "resolve"]
