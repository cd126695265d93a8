# SPDX-License-Identifier: Apache-2.0
"""What kernels are given: buffers that they can number."""

from __future__ import annotations

import pytest
import torch

from sugar_utils.errors import UserError
from sugar_utils.warp_launch import MAX_ROWS, as_array


@pytest.mark.parametrize("shape", [(2**31,), (2**31, 13), (3, 2**32)])
def test_buffers_that_kernels_cannot_number_are_refused(shape):
    with pytest.raises(UserError, match=r"more rows than kernels can number \(2\^31\)"):
        as_array(torch.empty(shape, device="meta"))


def test_many_values_in_countable_rows_are_not():
    # Without memory behind it: nothing reads the buffer.
    description = as_array(torch.empty(1, dtype=torch.uint8).expand(MAX_ROWS // 8, 32))
    assert description.shape[0] == MAX_ROWS // 8
