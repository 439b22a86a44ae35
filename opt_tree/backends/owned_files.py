"""Who may write to files that are run: kernels and compiled packages.

Owns the rule, and the sentence that names a way out. It knows nothing of what the files are.
"""

import os
import stat
from collections.abc import Iterable
from pathlib import Path

ANOTHER = "OPT_TREE_CACHE names another folder, of your own, for what is built and fetched"


def check_ours(folder: Path, names: Iterable[str]) -> None:
    """Raise PermissionError where another user than the caller and root could have written to a folder of the cache.

    Looked at are the cache, the folder and these files in it: each belongs to the caller or root, and nobody else may
    write to it. The folders above may belong to anybody; one that everybody may write to has to be sticky, as /tmp is.
    """
    if not hasattr(os, "getuid"):
        return  # not a system with owners and modes
    folder = folder.resolve()
    cache = folder.parent
    for path in (*cache.parents, cache, folder, *(folder / name for name in names)):
        try:
            found = path.stat()
        except OSError:
            continue  # not there yet; nothing is loaded from what cannot be seen
        mode, above = stat.S_IMODE(found.st_mode), path in cache.parents
        if not above and found.st_uid not in (0, os.getuid()):
            why = f"belongs to another user (uid {found.st_uid}, this process is {os.getuid()})"
        elif mode & stat.S_IWOTH and not (above and mode & stat.S_ISVTX):
            why = f"may be written to by everybody (mode {mode:o})"
        elif not above and mode & stat.S_IWGRP and not _is_own_group(found.st_gid):
            why = f"may be written to by its group (gid {found.st_gid}, mode {mode:o})"
        else:
            continue
        raise PermissionError(f"{path} {why}, and what is kept there is run: {ANOTHER}")


def _is_own_group(gid: int) -> bool:
    """Whether a group is the caller's alone: named like the user, as many systems make one for each, without others."""
    import grp  # where there are owners and modes
    import pwd

    try:
        group, name = grp.getgrgid(gid), pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return False
    return group.gr_name == name and {*group.gr_mem} <= {name}
