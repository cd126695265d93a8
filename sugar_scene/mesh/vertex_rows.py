# SPDX-License-Identifier: Apache-2.0
"""Values of vertices at the corners that refer to them, with a gradient that has the same bits."""

from __future__ import annotations

from torch import Tensor


def vertex_rows(values: Tensor, index: Tensor) -> Tensor:
    """``values[index]``; the gradients of a vertex are added up in the same order on every run.

    Indexing adds them up with atomics on a CPU, where rows are many and threads are several;
    gathering sorts them first. On a GPU it is the other way round.

    Args:
        values: (V, C)
        index: Rows, any shape. int64

    Returns:
        (*index.shape, C)
    """
    if values.is_cuda:
        return values[index]
    columns = values.shape[1]
    rows = values.gather(0, index.reshape(-1, 1).expand(-1, columns))
    return rows.view(*index.shape, columns)
