# SPDX-License-Identifier: Apache-2.0
"""GPU tensors in page-locked memory of the host.

The GPU reads and writes them over the bus, where kernels touch them. They cost nothing of its own
memory, so what most kernels read a few rows of may lie there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import warp as wp
from torch import Tensor

from sugar_utils.errors import UserError
from sugar_utils.memory import format_bytes

_BYTE: Any = wp.uint8
_PROBE = 0x5A


@dataclass(frozen=True)
class _MappedBytes:
    """Page-locked bytes, in the form in which torch takes memory of a GPU without a copy."""

    array: Any  # of Warp, which frees the bytes with it

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": (self.array.size,),
            "typestr": "|u1",
            "data": (self.array.ptr, False),
            "version": 3,
        }


def host_empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Make a device tensor in host memory; on a CPU, an ordinary tensor.

    Args:
        shape: Rows first, of less than 2 GiB each.

    Raises:
        UserError: The host has no such memory, or the device cannot reach it.
    """
    n_bytes = math.prod(shape) * dtype.itemsize
    if device.type == "cpu" or n_bytes == 0:
        return torch.empty(*shape, dtype=dtype, device=device)
    try:
        # In two dimensions, each of which Warp counts with 31 bits.
        rows = shape[0]
        array: Any = wp.empty((rows, n_bytes // rows), dtype=_BYTE, device="cpu", pinned=True)
        mapped = torch.as_tensor(_MappedBytes(array), device=device)
        _check_reach(mapped, array)
    except (RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(
            f"{format_bytes(n_bytes)} of page-locked memory on the host cannot be used ({reason}); "
            "close other programs, or give --sh_on_host False"
        ) from error
    return mapped.view(dtype).view(*shape)


def _check_reach(mapped: Tensor, array: Any) -> None:
    """Raise ``RuntimeError`` if writes of the device do not reach the host."""
    if mapped.data_ptr() != array.ptr:
        raise RuntimeError("torch copied it")
    mapped[:1] = _PROBE
    torch.cuda.synchronize(mapped.device)
    if int(array.numpy()[0, 0]) != _PROBE:
        raise RuntimeError("the GPU does not write to it")
