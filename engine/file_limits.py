"""The number of files a process may have open: every client's connection is one."""

from __future__ import annotations

import contextlib
import resource


def raise_file_limit() -> int:
    """Raise the soft limit to the hard one, where the system lets it; returns what it is then.

    The usual soft limit of 1024 would let a few hundred connections shut everybody else out.
    Workers inherit the limit.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):  # some systems bound it once more
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]
