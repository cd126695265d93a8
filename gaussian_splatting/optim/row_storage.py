# SPDX-License-Identifier: Apache-2.0
"""Where the rows of a parameter and of its moments lie: on the device, or on the host.

Rows on the host are copied in pieces, so that the device never has room for all of them. Their
number changes in place: to lock and free pages takes seconds for gigabytes, and the GPU waits.
"""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor

from gaussian_splatting.optim.host_memory import host_empty

ROWS_PER_PIECE = 2**18
CAPACITY = 1.25  # of new memory on the host, over the rows that are needed


class RowStorage(Protocol):
    """Makes tensors of rows; where they come from is not used any more."""

    def copied(self, values: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Copy values to a device and a type."""
        ...

    def zeros_like(self, values: Tensor, dtype: torch.dtype) -> Tensor:
        """Make zeros of the shape of values."""
        ...

    def selected(self, values: Tensor, keep: Tensor) -> Tensor:
        """Keep the rows where ``keep`` is true. (N, ...), (N,) bool -> (M, ...)"""
        ...

    def extended(self, values: Tensor, rows: Tensor) -> Tensor:
        """Add further rows behind values. (N, ...), (M, ...) -> (N + M, ...)"""
        ...


class DeviceRows:
    """Rows in the memory of the device."""

    def copied(self, values: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Copy values to a device and a type."""
        return values.detach().to(device, dtype, copy=True).contiguous()

    def zeros_like(self, values: Tensor, dtype: torch.dtype) -> Tensor:
        """Make zeros of the shape of values."""
        return torch.zeros_like(values, dtype=dtype)

    def selected(self, values: Tensor, keep: Tensor) -> Tensor:
        """Copy the rows where ``keep`` is true."""
        return values.detach()[keep].contiguous()

    def extended(self, values: Tensor, rows: Tensor) -> Tensor:
        """Copy values, and further rows behind them."""
        return torch.cat([values.detach(), rows.to(values.dtype)]).contiguous()


class HostRows:
    """Rows in page-locked memory of the host, which the device reaches over the bus."""

    def copied(self, values: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Copy values to the host and a type."""
        copy = host_empty(values.shape, dtype, device)
        for start in range(0, len(values), ROWS_PER_PIECE):
            rows = slice(start, start + ROWS_PER_PIECE)
            copy[rows] = values.detach()[rows].to(device, dtype)
        return copy

    def zeros_like(self, values: Tensor, dtype: torch.dtype) -> Tensor:
        """Make zeros of the shape of values."""
        return host_empty(values.shape, dtype, values.device).zero_()

    def selected(self, values: Tensor, keep: Tensor) -> Tensor:
        """Move the rows where ``keep`` is true to the beginning, in place."""
        rows_of = values.detach()
        end = 0
        for start in range(0, len(values), ROWS_PER_PIECE):
            rows = slice(start, start + ROWS_PER_PIECE)
            piece = rows_of[rows][keep[rows]]
            rows_of[end : end + len(piece)] = piece
            end += len(piece)
        return rows_of[:end]

    def extended(self, values: Tensor, rows: Tensor) -> Tensor:
        """Write rows behind values; where there is no memory behind them, both to new memory."""
        values = values.detach()
        shape = (len(values) + len(rows), *values.shape[1:])
        if math.prod(shape) * values.element_size() <= values.untyped_storage().nbytes():
            longer = values.as_strided(shape, values.stride())
        else:
            capacity = (math.ceil(CAPACITY * shape[0]), *shape[1:])
            longer = host_empty(capacity, values.dtype, values.device)[: shape[0]]
            longer[: len(values)] = values
        longer[len(values) :] = rows
        return longer
