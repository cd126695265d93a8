# SPDX-License-Identifier: Apache-2.0
"""Limits of the operating system that this process is under for a while. Not for Windows."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


@contextlib.contextmanager
def largest_file(n_bytes: int) -> Iterator[None]:
    """No file grows beyond ``n_bytes``: writing more fails, because Python ignores the signal."""
    import resource

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
