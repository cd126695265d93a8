# SPDX-License-Identifier: Apache-2.0
"""Screened Poisson reconstruction and quadric decimation, by whichever library is at hand.

Open3D needs system libraries (libusb, libGL) that bare machines and containers lack, and takes
seconds to load, so importing it is tried only when a mesh is made; pycolmap needs none. Both run
the screened Poisson code of Kazhdan and Hoppe (ACM Trans. Graph. 2013), and both tell a density per
vertex. Both hold the interpreter while they do, so that they do it in a process of their own.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from plyfile import PlyData, PlyElement

from sugar_extractors.mesh import poisson_process
from sugar_extractors.mesh.poisson_process import MESH, POINTS
from sugar_extractors.mesh.surface_samples import SurfaceSamples
from sugar_scene.mesh.triangle_mesh import TriangleMesh, read_mesh_ply
from sugar_utils.errors import UserError
from sugar_utils.flags import (
    Automatic,
    non_negative_float,
    non_negative_int,
    positive_float,
    positive_int,
    positive_or_auto,
)
from sugar_utils.libraries import load_pycolmap, run_alone
from sugar_utils.neighbors import nearest_neighbors_of
from sugar_utils.settings import flag

BACKENDS = ("auto", "open3d", "pycolmap")

POINT_WEIGHT = 2.0
"""Weight of the points against the smoothness, Open3D's choice; a parameter of pycolmap's."""

_KEEP_ALL = 1e-6
_MIN_RATIO = 1e-9

Step = TypeVar("Step", bound=Callable[..., Any])


_POISSON_ONLY = "with --mesh_extractor tsdf"
_flag = functools.partial(flag, group="surface", parse=positive_int, idle=_POISSON_ONLY)
_open3d = functools.partial(flag, group="surface", idle=f"{_POISSON_ONLY}; without Open3D")


@dataclass(frozen=True)
class SolverConfig:
    """Constants of the screened Poisson solver.

    Sums depend on the timing of threads: only with one the same input gives the same bits.
    """

    poisson_depth: Automatic = _flag(
        10, "octree depth; 6 to 8 where the mesh is bumpy or full of holes; auto: cells as small "
        "as a pixel on the surface, but not emptier than a point each, at most 10; unset: 10, "
        "auto with --preset fast", parse=positive_or_auto, metavar="{N,auto}", unset=True,
    )  # fmt: skip
    poisson_threads: int = _flag(
        1, "threads of the Poisson solver, 0 for all cores; with more than 1 no two runs give the "
        "same bits", parse=non_negative_int,
    )  # fmt: skip
    poisson_width: float = _open3d(
        0.0, "side of the finest octree cells in world units, in place of the depth; 0 for the "
        "depth", parse=non_negative_float,
    )  # fmt: skip
    poisson_scale: float = _open3d(
        1.1, "side of the solver's cube in sides of the points' bounding cube", parse=positive_float
    )
    poisson_linear_fit: bool = _open3d(False, "interpolate linearly between octree nodes")


Waiting = Callable[[int], None]


def _unheard(n_bytes: int) -> None:
    """Nobody asked."""


class PoissonMesh(NamedTuple):
    """A reconstructed surface.

    Attributes:
        densities: How well samples support each vertex, on a logarithmic scale; only the order
            of the values is the same for all backends. (V,)
    """

    mesh: TriangleMesh
    densities: np.ndarray


class MeshingBackend(Protocol):
    """What mesh extraction asks of a geometry library."""

    name: str

    def reconstruct(
        self, samples: SurfaceSamples, solver: SolverConfig, waiting: Waiting = _unheard
    ) -> PoissonMesh:
        """Screened Poisson surface of oriented points.

        Args:
            waiting: Called now and then with the bytes that the solver has in memory.
        """

    def decimate(self, mesh: TriangleMesh, n_faces: int) -> TriangleMesh:
        """Collapse edges by quadric error until about ``n_faces`` triangles are left."""


def choose_backend(name: str = "auto") -> MeshingBackend:
    """The backend of that name; ``auto`` is Open3D where it can be imported, else pycolmap."""
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


def _says_what_needs_memory(flags: str) -> Callable[[Step], Step]:
    """Make lack of memory in a step one line that names the flags which ask for less."""

    def decorate(step: Step) -> Step:
        @functools.wraps(step)
        def guarded(*args: Any) -> Any:
            try:
                return step(*args)
            # Native code throws bad_alloc, which arrives as this, too.
            except MemoryError as error:
                raise UserError(
                    f"out of memory in mesh extraction ({step.__name__}); lower {flags}, close "
                    "other programs, or use a machine with more memory"
                ) from error

        return guarded

    return decorate


class Open3dBackend:
    """Open3D, in memory."""

    name = "open3d"

    def __init__(self, open3d: Any) -> None:
        self._o3d = open3d
        open3d.utility.set_verbosity_level(open3d.utility.VerbosityLevel.Error)

    @_says_what_needs_memory("--poisson_depth or --surface_points")
    def reconstruct(
        self, samples: SurfaceSamples, solver: SolverConfig, waiting: Waiting = _unheard
    ) -> PoissonMesh:
        """Screened Poisson surface."""
        options = {
            "depth": solver.poisson_depth,
            "width": solver.poisson_width,
            "scale": solver.poisson_scale,
            "linear_fit": solver.poisson_linear_fit,
            "n_threads": solver.poisson_threads or -1,
        }
        with _work_folder() as folder:
            arrays = {
                "points": samples.points,
                "normals": samples.normals,
                "colors": samples.colors,
            }
            np.savez(folder / f"{POINTS}.npz", **arrays)
            _solve_alone(self.name, folder, options, waiting)
            with np.load(folder / f"{MESH}.npz") as found:
                mesh = _mesh_of(found["vertices"], found["faces"], found["colors"])
                return PoissonMesh(mesh, found["densities"])

    @_says_what_needs_memory("--poisson_depth")
    def decimate(self, mesh: TriangleMesh, n_faces: int) -> TriangleMesh:
        """Quadric decimation; colours are carried along."""
        if mesh.n_faces <= n_faces:
            return mesh
        o3d = self._o3d
        copy = o3d.geometry.TriangleMesh(
            o3d.utility.Vector3dVector(mesh.vertices),
            o3d.utility.Vector3iVector(mesh.faces.astype(np.int32)),
        )
        copy.vertex_colors = o3d.utility.Vector3dVector(mesh.colors / 255.0)
        small = copy.simplify_quadric_decimation(n_faces)
        parts = small.vertices, small.triangles, small.vertex_colors
        return _mesh_of(*(np.asarray(part) for part in parts))


class PycolmapBackend:
    """pycolmap, through files in the system's temporary folder."""

    name = "pycolmap"

    @_says_what_needs_memory("--poisson_depth or --surface_points")
    def reconstruct(
        self, samples: SurfaceSamples, solver: SolverConfig, waiting: Waiting = _unheard
    ) -> PoissonMesh:
        """Screened Poisson surface; the cloud is scaled to a unit cube for the float32 files."""
        options = {
            "depth": solver.poisson_depth,
            "point_weight": POINT_WEIGHT,
            "num_threads": solver.poisson_threads or -1,
            # Above 0 the densities are part of the file; so little removes nothing.
            "trim": _KEEP_ALL,
        }
        middle, size = _cube_of(samples.points)
        with _work_folder() as folder:
            _write_points(folder / f"{POINTS}.ply", samples, middle, size)
            _solve_alone(self.name, folder, options, waiting)
            mesh = _read_result(folder / f"{MESH}.ply")
            densities = PlyData.read(str(folder / f"{MESH}.ply"))["vertex"]["value"]
        mesh = TriangleMesh(mesh.vertices * size + middle, mesh.faces, mesh.colors)
        return PoissonMesh(mesh, np.asarray(densities, dtype=np.float64))

    @_says_what_needs_memory("--poisson_depth")
    def decimate(self, mesh: TriangleMesh, n_faces: int) -> TriangleMesh:
        """Quadric decimation; colours are those of the nearest vertex before."""
        if mesh.n_faces <= n_faces:
            return mesh
        pycolmap = load_pycolmap()
        options = pycolmap.MeshSimplificationOptions()
        options.target_face_ratio = max(n_faces / mesh.n_faces, _MIN_RATIO)
        middle, size = _cube_of(mesh.vertices)
        with _work_folder() as folder, _quiet(pycolmap):
            _write_plain(folder / "mesh.ply", (mesh.vertices - middle) / size, mesh.faces)
            pycolmap.simplify_mesh(folder / "mesh.ply", folder / "small.ply", options)
            small = _read_result(folder / "small.ply")
        vertices = small.vertices * size + middle
        rows = nearest_neighbors_of(
            torch.from_numpy(vertices.astype(np.float32)),
            torch.from_numpy(mesh.vertices.astype(np.float32)),
            1,
        ).indices[:, 0]  # fmt: skip
        return TriangleMesh(vertices, small.faces, mesh.colors[rows.numpy()])


def _solve_alone(library: str, folder: Path, options: dict[str, Any], waiting: Waiting) -> None:
    run_alone(poisson_process.__name__, [library, str(folder), json.dumps(options)], waiting)


def _mesh_of(vertices: np.ndarray, faces: np.ndarray, colors: np.ndarray) -> TriangleMesh:
    colors = np.clip(np.rint(colors * 255), 0, 255).astype(np.uint8)
    return TriangleMesh(vertices.copy(), faces.astype(np.int64), colors)


@contextlib.contextmanager
def _work_folder() -> Iterator[Path]:
    try:
        with tempfile.TemporaryDirectory(prefix="mesh-", ignore_cleanup_errors=True) as folder:
            yield Path(folder)
    except OSError as error:
        raise UserError(
            f"cannot write in the temporary folder {tempfile.gettempdir()}: "
            f"{error.strerror or error}; free some space or set TMPDIR"
        ) from error


@contextlib.contextmanager
def _quiet(pycolmap: Any) -> Iterator[None]:
    """Keep the library's own log off the terminal."""
    before = pycolmap.logging.minloglevel
    pycolmap.logging.minloglevel = int(pycolmap.logging.Level.ERROR)
    try:
        yield
    finally:
        pycolmap.logging.minloglevel = before


def _cube_of(points: np.ndarray) -> tuple[np.ndarray, float]:
    low, high = points.min(axis=0).astype(np.float64), points.max(axis=0).astype(np.float64)
    return (low + high) / 2, max(float((high - low).max()), 1e-12)


def _write_points(path: Path, samples: SurfaceSamples, middle: np.ndarray, size: float) -> None:
    names = ("x", "y", "z", "nx", "ny", "nz")
    kinds = [*((n, "<f4") for n in names), *((n, "u1") for n in ("red", "green", "blue"))]
    table = np.empty(len(samples), dtype=kinds)
    for axis, name in enumerate(names[:3]):
        table[name] = (samples.points[:, axis] - middle[axis]) / size
        table[names[3 + axis]] = samples.normals[:, axis]
        table[("red", "green", "blue")[axis]] = samples.colors[:, axis]
    PlyData([PlyElement.describe(table, "vertex")], byte_order="<").write(str(path))


def _write_plain(path: Path, vertices: np.ndarray, faces: np.ndarray) -> None:
    header = (
        "ply\nformat binary_little_endian 1.0\n"
        f"element vertex {len(vertices)}\n"
        "property float x\nproperty float y\nproperty float z\n"
        f"element face {len(faces)}\nproperty list uchar int vertex_indices\nend_header\n"
    )
    rows = np.empty(len(faces), dtype=[("n", "u1"), ("rows", "<i4", (3,))])
    rows["n"], rows["rows"] = 3, faces
    with path.open("wb") as file:
        file.write(header.encode())
        file.write(vertices.astype("<f4").tobytes())
        file.write(rows.tobytes())


def _read_result(path: Path) -> TriangleMesh:
    if not path.is_file():
        raise UserError(
            "pycolmap made no mesh of the surface points; check free space in the temporary "
            f"folder {tempfile.gettempdir()}, or lower --poisson_depth"
        )
    return read_mesh_ply(path)
