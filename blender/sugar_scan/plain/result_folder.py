# SPDX-License-Identifier: Apache-2.0
"""The folder of results of a run: its files, and how they lie to the scene."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .errors import ScanError
from .placement import Placement

_MESH = "mesh.obj"
_SPLATS = "splats.ply"


@dataclass(frozen=True)
class ResultFolder:
    """Files of a folder of results; None for what the run did not make."""

    path: Path
    mesh: Path | None  # textured OBJ
    splats: Path | None  # PLY of the Gaussians
    model: Path | None  # the .pt that the Gaussians were read from, to edit them
    up: str | None  # axis that points up; None for the axes of the capture
    matrix: np.ndarray  # from the scene to the files, (4, 4)

    @property
    def name(self) -> str:
        """Name of the scan."""
        return self.path.name


def read_result_folder(path: Path) -> ResultFolder:
    """Find the files of a folder of results.

    Raises:
        ScanError: It is no such folder, or its record is damaged.
    """
    placement = Placement.of(path)
    result = ResultFolder(
        path=path.resolve(),
        mesh=_if_file(path / _MESH),
        splats=_if_file(path / _SPLATS),
        model=None if placement.model is None else _if_file(placement.model),
        up=placement.up,
        matrix=placement.matrix,
    )
    if result.mesh is None and result.splats is None:
        raise ScanError(f"{path}: has neither {_MESH} nor {_SPLATS}; run the program to its end")
    return result


def _if_file(path: Path) -> Path | None:
    return path.resolve() if path.is_file() else None
