# SPDX-License-Identifier: Apache-2.0
"""Checks that break in every way that checks on a GPU can break."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

from benchmarks.gpu.common import Check, Finding, Setup


def fine(setup: Setup) -> Iterator[Finding]:
    """Finds what it should."""
    yield Finding("first", True, "as it should be", {"figure": float("nan")})
    yield Finding("second", False, "wrong")


def raises(setup: Setup) -> Iterator[Finding]:
    """An exception after a finding."""
    yield Finding("before", True, "kept")
    raise ValueError("two\nlines")


def dies(setup: Setup) -> Iterator[Finding]:
    """Ends the process as an error in native code does."""
    yield Finding("before", True, "kept")
    print("words of the dying", flush=True)
    os._exit(7)


def hangs(setup: Setup) -> Iterator[Finding]:
    """Never ends."""
    yield Finding("before", True, "kept")
    time.sleep(60)


def needs_cuda(setup: Setup) -> Iterator[Finding]:
    """Says nothing here."""
    setup.need_cuda()
    yield Finding("on CUDA", True, "there is one")


CHECKS = (
    Check("fine", fine),
    Check("raises", raises),
    Check("dies", dies),
    Check("hangs", hangs, 0.5),
    Check("needs CUDA", needs_cuda),
    Check("fine again", fine),
)
