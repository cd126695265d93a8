# SPDX-License-Identifier: Apache-2.0
"""Loading pycolmap, which comes with habits of a program of its own."""

from __future__ import annotations

import signal
import sys
import threading
from types import ModuleType


def load_pycolmap() -> ModuleType:
    """pycolmap, without its handler of SIGTERM.

    Once loaded, it answers a request to terminate with a page of addresses, instead of whoever was
    to answer it before.
    """
    if "pycolmap" in sys.modules:
        return sys.modules["pycolmap"]
    import pycolmap

    handler = signal.getsignal(signal.SIGTERM)
    # Only the main thread may set a handler, and only those that Python knows can be set again.
    if threading.current_thread() is threading.main_thread() and handler is not None:
        signal.signal(signal.SIGTERM, handler)
    return pycolmap
