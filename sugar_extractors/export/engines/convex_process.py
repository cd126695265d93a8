# SPDX-License-Identifier: Apache-2.0
"""Convex pieces by CoACD in a subprocess: ``python -m ... FOLDER SETTINGS``.

It reads the mesh from the folder and writes the pieces there.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from sugar_utils.libraries import load_package

INPUT = "mesh.npz"
OUTPUT = "pieces.npz"


def cut(folder: Path, settings: dict[str, Any]) -> None:
    """Cut a mesh into convex pieces.

    Args:
        folder: Holds ``INPUT`` with ``vertices`` and ``faces``; gets ``OUTPUT`` with ``count``, and
            ``vertices_K`` and ``faces_K`` of each piece.
        settings: Arguments of ``run_coacd``.

    Raises:
        ValueError: There are no pieces.
    """
    (coacd,) = load_package("--collision convex", "coacd", "coacd")
    coacd.set_log_level("error")
    with np.load(folder / INPUT) as arrays:
        mesh = coacd.Mesh(arrays["vertices"], arrays["faces"])
    pieces = coacd.run_coacd(mesh, **settings)
    if not pieces:
        raise ValueError("there are no pieces")
    arrays: dict[str, Any] = {"count": np.array(len(pieces))}
    for number, (vertices, faces) in enumerate(pieces):
        arrays[f"vertices_{number}"] = np.asarray(vertices, np.float64)
        arrays[f"faces_{number}"] = np.asarray(faces, np.int64)
    np.savez(folder / OUTPUT, **arrays)


if __name__ == "__main__":
    work_folder, arguments = sys.argv[1:]
    cut(Path(work_folder), json.loads(arguments))
