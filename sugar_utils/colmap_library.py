# SPDX-License-Identifier: Apache-2.0
"""Loading pycolmap, which comes with habits of a program of its own."""

from __future__ import annotations

import signal
import sys
import threading
from types import ModuleType

_FATAL = 3
"""Level by which glog, which pycolmap prints with, knows what it dies of."""


def load_pycolmap() -> ModuleType:
    """pycolmap, without its handler of SIGTERM, and silent.

    Once loaded, it answers a request to terminate with a page of addresses, instead of whoever was
    to answer it before. Of what it does it would print several lines per photograph; what goes
    wrong is known by what it returns.
    """
    if "pycolmap" in sys.modules:
        return _silenced(sys.modules["pycolmap"])
    import pycolmap

    handler = signal.getsignal(signal.SIGTERM)
    # Only the main thread may set a handler, and only those that Python knows can be set again.
    if threading.current_thread() is threading.main_thread() and handler is not None:
        signal.signal(signal.SIGTERM, handler)
    return _silenced(pycolmap)


def _silenced(pycolmap: ModuleType) -> ModuleType:
    pycolmap.logging.minloglevel = _FATAL
    return pycolmap
