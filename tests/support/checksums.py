# SPDX-License-Identifier: Apache-2.0
"""TensorBoard's checksum by tables, for tests.

Without TensorFlow, TensorBoard adds up CRC-32C byte by byte in Python. Short runs log every
iteration, and it was a fifth of their time.
"""

from __future__ import annotations

import numpy as np
from tensorboard.compat.tensorflow_stub import pywrap_tensorflow

ORIGINAL = pywrap_tensorflow.crc_update
LONGEST, SHORTEST = 4096, 64
"""Bytes that are summed at once; fewer than ``SHORTEST`` are left to the original."""

_MASK = 0xFFFFFFFF


def _tables() -> np.ndarray:
    """Share of a byte in the sum when k bytes follow it. (LONGEST, 256) uint32, by k and byte"""
    one = np.array(pywrap_tensorflow.CRC_TABLE, dtype=np.uint32)
    tables = np.empty((LONGEST, 256), dtype=np.uint32)
    tables[0] = one
    for k in range(1, LONGEST):
        before = tables[k - 1]
        tables[k] = one[before & 0xFF] ^ (before >> 8)
    return tables


_TABLES = _tables()


def crc_update(crc: int, data: bytes) -> int:
    """The sum of ``data`` after bytes whose sum is ``crc``: that of TensorBoard's function."""
    content = np.frombuffer(bytes(data), dtype=np.uint8)
    for start in range(0, len(content), LONGEST):
        part = content[start : start + LONGEST].copy()
        if len(part) < SHORTEST:
            crc = ORIGINAL(crc, part.tobytes())
            continue
        # The sum so far acts as if it had been added to the next four bytes.
        part[:4] ^= np.frombuffer((crc ^ _MASK).to_bytes(4, "little"), dtype=np.uint8)
        following = np.arange(len(part) - 1, -1, -1)
        crc = int(np.bitwise_xor.reduce(_TABLES[following, part])) ^ _MASK
    return crc


def install() -> None:
    """Let TensorBoard use it, to write and to read."""
    pywrap_tensorflow.crc_update = crc_update
