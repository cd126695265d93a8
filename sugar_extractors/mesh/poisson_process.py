# SPDX-License-Identifier: Apache-2.0
"""Screened Poisson in a subprocess: ``python -m ... LIBRARY FOLDER OPTIONS``.

It reads the points from the folder and writes the mesh there. Only the library is imported.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

# names of the files, without their endings
POINTS = "points"
MESH = "mesh"


def by_pycolmap(folder: Path, options: dict[str, Any]) -> None:
    """Reconstruct by pycolmap, from PLY to PLY.

    Args:
        options: Attributes of ``PoissonMeshingOptions``.
    """
    from sugar_utils.libraries import load_pycolmap

    pycolmap = load_pycolmap()
    settings = pycolmap.PoissonMeshingOptions()
    for name, value in options.items():
        setattr(settings, name, value)
    pycolmap.poisson_meshing(folder / f"{POINTS}.ply", folder / f"{MESH}.ply", settings)


def by_open3d(folder: Path, options: dict[str, Any]) -> None:
    """Reconstruct by Open3D, from a NumPy archive to another one.

    Args:
        options: Arguments of ``create_from_point_cloud_poisson``.
    """
    import open3d

    open3d.utility.set_verbosity_level(open3d.utility.VerbosityLevel.Error)
    vectors = open3d.utility.Vector3dVector
    cloud = open3d.geometry.PointCloud()
    with np.load(folder / f"{POINTS}.npz") as samples:
        cloud.points = vectors(samples["points"].astype(np.float64))
        cloud.normals = vectors(samples["normals"].astype(np.float64))
        cloud.colors = vectors(samples["colors"] / 255.0)
    poisson = open3d.geometry.TriangleMesh.create_from_point_cloud_poisson
    mesh, densities = poisson(cloud, **options)
    np.savez(
        folder / f"{MESH}.npz",
        vertices=np.asarray(mesh.vertices),
        faces=np.asarray(mesh.triangles),
        colors=np.asarray(mesh.vertex_colors),
        densities=np.asarray(densities),
    )


if __name__ == "__main__":
    library, work_folder, settings = sys.argv[1:]
    solvers = {"pycolmap": by_pycolmap, "open3d": by_open3d}
    solvers[library](Path(work_folder), json.loads(settings))
