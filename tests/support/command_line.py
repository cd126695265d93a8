# SPDX-License-Identifier: Apache-2.0
"""Command lines of tests, written as settings."""

from __future__ import annotations

import socket

WITHOUT_VALUE = ()
"""Value of a flag without a value."""


def as_flags(**settings: object) -> tuple[object, ...]:
    """Words of a command line: ``s=scene, iterations=4`` is ``-s scene --iterations 4``.

    A tuple is as many words after one flag, None leaves the flag out.
    """
    words: list[object] = []
    for name, value in settings.items():
        if value is None:
            continue
        words.append(f"-{name}" if len(name) == 1 else f"--{name}")
        words.extend(value if isinstance(value, tuple) else (value,))
    return tuple(words)


def free_port() -> int:
    """Return the number of a port of this machine that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
