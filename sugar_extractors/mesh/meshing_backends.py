# SPDX-License-Identifier: Apache-2.0
"""Screened Poisson reconstruction, by whichever library is at hand.

Open3D needs system libraries that bare machines lack and takes seconds to load, so it is tried only
when a mesh is made; pycolmap needs none. Both run the screened Poisson code of Kazhdan and Hoppe
(ACM Trans. Graph. 2013), tell a density per vertex, and hold the interpreter meanwhile, so they run
in a subprocess.
"""

from __future__ import annotations

import abc
import contextlib
import importlib
import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import numpy as np
from plyfile import PlyData, PlyElement

from gaussian_splatting.core.color_bytes import rounded_bytes
from gaussian_splatting.data.cameras import Camera
from sugar_extractors.mesh import poisson_process
from sugar_extractors.mesh.level_sets import SurfaceSamples
from sugar_extractors.mesh.poisson_process import MESH, POINTS
from sugar_extractors.mesh.surface_sizes import SCALE, automatic_depth, pixel_size
from sugar_scene import triangle_mesh as meshes
from sugar_scene.triangle_mesh import TriangleMesh
from sugar_utils import flags
from sugar_utils.errors import UserError, explained
from sugar_utils.libraries import run_alone
from sugar_utils.settings import flag

Waiting = Callable[[int], None]  # called now and then with the bytes in use
BACKENDS = ("auto", "open3d", "pycolmap")
POINT_WEIGHT = 2.0  # of points against smoothness: Open3D's choice, a parameter of pycolmap's
USUAL_QUANTILE = 0.1  # of the original; of an object within its masks it would cut thin parts away
_KEEP_ALL = 1e-6
_PLACES = [(name, "<f4") for name in ("x", "y", "z")]
_NORMALS = [(name, "<f4") for name in ("nx", "ny", "nz")]
_COLORS = [(name, "u1") for name in ("red", "green", "blue")]
_SOLVER = (poisson_process.__name__,)
FUSED = "with --mesh_extractor tsdf or tetrahedra"  # what has no effect there
_flag = partial(flag, group="surface", no_effect_when=FUSED)


@dataclass(frozen=True)
class PoissonConfig:
    """Settings of the reconstruction; with one thread the same input gives the same bits.

    ``max_gap`` acts only where a share of the vertices is cut away: who wants the surface closed
    gets it.
    """

    poisson_depth: flags.Automatic = _flag(
        10,
        "octree depth; 6 to 8 where the mesh is bumpy or full of holes; auto: cells as small "
        "as a pixel on the surface, but not emptier than a point each, at most 10; unset: 10, "
        "auto with --preset fast",
        parse=flags.positive_or_auto,
        metavar="{N,auto}",
        modes={"fast": flags.AUTO},
    )
    poisson_threads: int = _flag(
        1,
        "threads of the Poisson solver, 0 for all cores; with more than 1 no two runs give the "
        "same bits",
        parse=flags.non_negative_int,
    )
    vertices_density_quantile: float | None = _flag(
        None,
        "share of badly supported Poisson vertices to cut away; 0 avoids holes; unset: 0.1, "
        "or 0 where masks say what the object is and cut off the rest",
        parse=flags.share,
    )
    max_gap: float = _flag(
        4.0,
        "cut away Poisson vertices farther than this many octree cells from every surface "
        "point; 0 keeps them",
        parse=flags.non_negative_float,
        no_effect_when=f"{FUSED}; with --vertices_density_quantile 0, which asks for a closed "
        "surface",
    )

    def with_depth(self, points: np.ndarray, cameras: Sequence[Camera]) -> PoissonConfig:
        """Return the settings with a number for an ``auto`` depth. points: (P, 3)"""
        if self.poisson_depth != flags.AUTO:
            return self
        depth = automatic_depth(points, pixel_size(points, cameras))
        return replace(self, poisson_depth=depth)

    def resolved(self, has_hull: bool) -> PoissonConfig:
        """Return the settings with a number for an unset share; a hull cuts off what is outside."""
        if self.vertices_density_quantile is not None:
            return self
        return replace(self, vertices_density_quantile=0.0 if has_hull else USUAL_QUANTILE)


class PoissonMesh(NamedTuple):
    """A reconstructed surface and its support."""

    mesh: TriangleMesh  # screened Poisson surface of oriented points
    densities: np.ndarray  # support of each vertex; only their order is that of all backends, (V,)


@contextlib.contextmanager
def _enough_memory() -> Iterator[None]:
    """Turn lack of memory in a reconstruction into an error that names the flags to lower."""
    try:
        yield
    # Native code throws bad_alloc, which arrives as this, too.
    except MemoryError as error:
        raise UserError(
            "out of memory in mesh extraction (reconstruct); lower --poisson_depth or "
            "--surface_points, close other programs, or use a machine with more memory"
        ) from error


class MeshingBackend(abc.ABC):
    """Abstract base of the geometry libraries that mesh extraction uses."""

    name: str  # value of --meshing_backend

    @abc.abstractmethod
    def reconstruct(
        self, samples: SurfaceSamples, config: PoissonConfig, waiting: Waiting
    ) -> PoissonMesh:
        """Return the screened Poisson surface of points.

        Raises:
            UserError: Memory or disk is full.
        """


class Open3dBackend(MeshingBackend):
    """Open3D."""

    name = "open3d"

    def __init__(self, open3d: ModuleType) -> None:
        self._o3d = open3d
        open3d.utility.set_verbosity_level(open3d.utility.VerbosityLevel.Error)

    @_enough_memory()
    def reconstruct(
        self, samples: SurfaceSamples, config: PoissonConfig, waiting: Waiting
    ) -> PoissonMesh:
        threads = config.poisson_threads or -1
        options = {"depth": config.poisson_depth, "scale": SCALE, "n_threads": threads}
        with _work_folder() as folder:
            np.savez(folder / f"{POINTS}.npz", **vars(samples))
            run_alone(*_SOLVER, [self.name, str(folder), json.dumps(options)], waiting)
            with np.load(folder / f"{MESH}.npz") as arrays:
                mesh = _mesh_of(arrays["vertices"], arrays["faces"], arrays["colors"])
                return PoissonMesh(mesh, arrays["densities"])


class PycolmapBackend(MeshingBackend):
    """pycolmap, through files in the system's temporary folder, scaled to a cube for float32."""

    name = "pycolmap"

    @_enough_memory()
    def reconstruct(
        self, samples: SurfaceSamples, config: PoissonConfig, waiting: Waiting
    ) -> PoissonMesh:
        options = {
            "depth": config.poisson_depth,
            "point_weight": POINT_WEIGHT,
            "num_threads": config.poisson_threads or -1,
            # Above 0 the densities are part of the file; so little removes nothing.
            "trim": _KEEP_ALL,
        }
        middle, size = _cube_of(samples.points)
        with _work_folder() as folder:
            _write_points(folder / f"{POINTS}.ply", samples, middle, size)
            run_alone(*_SOLVER, [self.name, str(folder), json.dumps(options)], waiting)
            mesh = _read_result(folder / f"{MESH}.ply")
            densities = PlyData.read(str(folder / f"{MESH}.ply"))["vertex"]["value"]
        mesh = TriangleMesh(mesh.vertices * size + middle, mesh.faces, mesh.colors)
        return PoissonMesh(mesh, np.asarray(densities, dtype=np.float64))


def choose_backend(name: str = "auto") -> MeshingBackend:
    """Return the backend of a name; ``auto`` is Open3D if it can be imported, else pycolmap.

    Raises:
        UserError: Open3D was chosen and cannot be imported.
    """
    if name == "pycolmap":
        return PycolmapBackend()
    try:
        return Open3dBackend(importlib.import_module("open3d"))
    # A missing system library is an ImportError, an incompatible one an OSError.
    except (ImportError, OSError) as error:
        if name == "open3d":
            raise UserError(
                f"Open3D cannot be imported ({error}); install open3d and the system library it "
                "names, or use --meshing_backend pycolmap"
            ) from error
        return PycolmapBackend()


def _mesh_of(vertices: np.ndarray, faces: np.ndarray, colors: np.ndarray) -> TriangleMesh:
    colors = rounded_bytes(colors * 255)
    return TriangleMesh(vertices.copy(), faces.astype(np.int64), colors)


@contextlib.contextmanager
def _work_folder() -> Iterator[Path]:
    what = f"cannot write in the temporary folder {tempfile.gettempdir()}:"
    advice = "free some space or set TMPDIR"
    with (
        explained(what, advice),
        tempfile.TemporaryDirectory(prefix="mesh-", ignore_cleanup_errors=True) as folder,
    ):
        yield Path(folder)


def _cube_of(points: np.ndarray) -> tuple[np.ndarray, float]:
    """Return the middle, (3,), and the longest side of the box around points, (P, 3)."""
    low = points.min(axis=0).astype(np.float64)
    high = points.max(axis=0).astype(np.float64)
    side = float((high - low).max())
    return (low + high) / 2, max(side, 1e-12)


def _write_points(path: Path, samples: SurfaceSamples, middle: np.ndarray, size: float) -> None:
    scaled = (samples.points - middle) / size
    columns = [*scaled.T, *samples.normals.T, *samples.colors.T]
    table = np.rec.fromarrays(columns, dtype=[*_PLACES, *_NORMALS, *_COLORS])
    PlyData([PlyElement.describe(table, "vertex")], byte_order="<").write(str(path))


def _read_result(path: Path) -> TriangleMesh:
    if not path.is_file():
        raise UserError(
            "pycolmap made no mesh of the surface points; check free space in the temporary "
            f"folder {tempfile.gettempdir()}, or lower --poisson_depth"
        )
    return meshes.read_mesh_ply(path)
