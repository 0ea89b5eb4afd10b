"""The memory of this machine."""

from __future__ import annotations

import os


def host_bytes() -> int | None:
    """The memory of this machine, in bytes; None if it is not known."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):  # not a POSIX system
        return None
