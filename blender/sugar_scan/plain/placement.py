# SPDX-License-Identifier: Apache-2.0
"""Where results stand, by the record in their folder; the schema is the program's own."""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .errors import ScanError

TRANSFORM = "transform.json"
UP = "+y"
"""Word of records for results that stand upright."""

KEYS = (
    "matrix",
    "glb_matrix",
    "up",
    "unit",
    "offset",
    "world_offset",
    "map",
    "model",
    "scene",
    "checkpoint",
)
"""All that a record may hold; a file without ``matrix`` is about something else."""


@dataclass(frozen=True)
class Placement:
    """Where the files of a folder of results stand."""

    matrix: np.ndarray  # from the scene to the files, (4, 4) float64
    up: str | None  # axis that points up; None for the axes of the capture
    unit: str | None  # of lengths; None for that of the capture
    model: Path | None  # the .pt that the Gaussians were read from, to edit them

    @classmethod
    def of(cls, folder: Path) -> "Placement":
        """Read the record of a folder of results.

        Raises:
            ScanError: It has none, or a damaged one.
        """
        path = folder / TRANSFORM
        if not path.is_file():
            raise ScanError(
                f"{folder}: has no {TRANSFORM}; choose the folder of results, such as "
                "output/my_scan"
            )
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
            matrix = np.array(record["matrix"], dtype=np.float64).reshape(4, 4)
            if not np.isfinite(matrix).all():
                raise ValueError("its matrix is not finite")
            model = record.get("model")
            return cls(
                matrix,
                record.get("up"),
                record.get("unit"),
                None if model is None else folder / model,
            )
        except (OSError, LookupError, TypeError, ValueError, AttributeError) as error:
            raise ScanError(f"{path}: damaged ({error}); run the program again") from error
