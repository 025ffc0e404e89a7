# SPDX-License-Identifier: MIT
"""Memory of a step that the next step uses again, instead of giving it back to the system.

A step's activations are blocks of megabytes. glibc gets such a block from the kernel and gives it
back when it is freed, so each step pays for page faults and for zeroed pages: a tenth of a step of
most towers, half of one with large batches (`make bench`). `keep` tells glibc to take all blocks
from its heap and to keep what is freed: mallopt(3), parameters of <malloc.h>. The memory of a
process is then that of its largest step; blocks that are freed are used again.

Settings of glibc that the environment already makes (`MALLOC_TOP_PAD_` and its kind) stay as they
are. Other C libraries (musl, macOS) and allocators that were loaded in place of glibc's (jemalloc,
tcmalloc, mimalloc) have rules of their own and are left alone. Nothing here imports torch: loader
workers come through here too.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any, Literal

Allocator = Literal["keep", "system"]
ALLOCATORS: tuple[Allocator, ...] = ("keep", "system")

# Parameters of mallopt(3) with what `keep` sets them to, and the variable that sets each.
# A block is never mapped on its own; a heap's free end is given back from 2 GiB on, the largest
# number that mallopt takes; a heap grows by 64 MiB more than what is asked for.
_KEEP = {
    "MALLOC_MMAP_MAX_": (-4, 0),
    "MALLOC_TRIM_THRESHOLD_": (-1, 2**31 - 1),
    "MALLOC_TOP_PAD_": (-2, 64 << 20),
}
_TUNABLES = "GLIBC_TUNABLES"
# A function that only this allocator has.
_OTHERS = {
    "jemalloc": "mallctl",
    "tcmalloc": "MallocExtension_ReleaseFreeMemory",
    "mimalloc": "mi_version",
}


_kept = False


def is_kept() -> bool:
    """Return whether `keep_memory` has taken effect in this process."""
    return _kept


def keep_memory(environment: Mapping[str, str], library: Any = None) -> tuple[bool, str]:
    """Tell glibc to keep freed memory for this process.

    Args:
        environment: the process's, whose own settings of glibc count.
        library: what has the C library's functions; the process itself by default.

    Returns:
        Whether it does so now, and one line that says what was found.
    """
    global _kept
    if library is None:
        library = ctypes.CDLL(None)
    for name, function in _OTHERS.items():
        if hasattr(library, function):
            return False, f"{name} is loaded in place of the C library's; its own settings count"
    if not hasattr(library, "gnu_get_libc_version") or not hasattr(library, "mallopt"):
        return False, "the C library is not glibc; its own settings count"
    given = [name for name in (*_KEEP, "MALLOC_MMAP_THRESHOLD_") if name in environment]
    given += [_TUNABLES] if "glibc.malloc." in environment.get(_TUNABLES, "") else []
    if given:
        return False, f"the environment's own settings of glibc count: {', '.join(given)}"
    refused = [name for name, pair in _KEEP.items() if not library.mallopt(*pair)]
    if refused:
        return False, f"glibc refuses to set {', '.join(refused)}"
    _kept = True
    return True, "glibc keeps freed memory for the next step"
