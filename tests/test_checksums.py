# SPDX-License-Identifier: Apache-2.0
"""The checksum that tests use in place of TensorBoard's is the same one."""

import random

import pytest

from tests.support.checksums import LONGEST, ORIGINAL, SHORTEST, crc_update

LENGTHS = (0, 1, 8, SHORTEST - 1, SHORTEST, 1000, LONGEST, LONGEST + 1, LONGEST + SHORTEST, 20_000)


@pytest.mark.parametrize("length", LENGTHS)
def test_sums_are_those_of_tensorboard(length):
    data = random.Random(length).randbytes(length)
    assert crc_update(0, data) == ORIGINAL(0, data)
    assert crc_update(12_345, data) == ORIGINAL(12_345, data)


def test_the_sum_is_that_of_the_standard():
    assert crc_update(0, b"123456789") == 0xE3069283
    assert crc_update(0, bytes(SHORTEST)) != crc_update(0, bytes(SHORTEST + 1))
