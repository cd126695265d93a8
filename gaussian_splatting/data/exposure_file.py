# SPDX-License-Identifier: Apache-2.0
"""Exposures of photographs beside the Gaussians: ``exposure.json``, as 3DGS programs write it.

The name of each photograph and a 3 x 4 matrix, which takes colours of the model (with a 1 below) to
those of the photograph. Of this program it holds gains on the diagonal and offsets in the last
column.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated

import msgspec
import torch
from torch import Tensor

from sugar_utils.files import file_digest, read_json, write_json_atomic
from sugar_utils.schemas import FileName, conform

EXPOSURE_FILE = "exposure.json"
_Entry = Annotated[float, msgspec.Meta(ge=-1e3, le=1e3)]
_Gain = Annotated[float, msgspec.Meta(ge=1e-3, le=1e3)]
_Matrix = tuple[
    tuple[_Gain, _Entry, _Entry, _Entry],
    tuple[_Entry, _Gain, _Entry, _Entry],
    tuple[_Entry, _Entry, _Gain, _Entry],
]


def write_exposures(path: Path, exposures: Mapping[str, Tensor]) -> None:
    """Write exposures by name: logarithms of gains, then offsets, (2, 3) each."""

    def matrix(log_gains: list[float], offsets: list[float]) -> list[list[float]]:
        rows = [[0.0, 0.0, 0.0, offset] for offset in offsets]
        for channel, value in enumerate(log_gains):
            rows[channel][channel] = math.exp(value)
        return rows

    write_json_atomic(path, {name: matrix(*e.tolist()) for name, e in exposures.items()})


def read_exposures(path: Path, notify: Callable[[str], None]) -> dict[str, Tensor]:
    """Read what :func:`write_exposures` wrote; empty where there is no such file.

    Args:
        path: The file.
        notify: Told that matrices of another program mix channels, which is left out.

    Raises:
        UserError: It cannot be read, or is no table of exposures.
    """
    if not path.is_file():
        return {}
    matrices = conform(read_json(path), dict[FileName, _Matrix], path)
    if any(m[i][j] for m in matrices.values() for i in range(3) for j in range(3) if i != j):
        notify(f"{path}: its matrices mix channels; only gains and offsets are taken over")
    return {
        name: torch.tensor(
            [[math.log(m[c][c]) for c in range(3)], [m[c][3] for c in range(3)]], device="cpu"
        )
        for name, m in matrices.items()
    }


def exposure_digest(path: Path) -> dict[str, str]:
    """The file as an input of a run; empty where there is none."""
    return {"exposures": file_digest(path)} if path.is_file() else {}
