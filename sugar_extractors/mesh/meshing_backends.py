# SPDX-License-Identifier: Apache-2.0
"""Screened Poisson reconstruction and quadric decimation, by whichever library is at hand.

Open3D needs system libraries that bare machines lack and takes seconds to load, so it is tried only
when a mesh is made; pycolmap needs none. Both run the screened Poisson code of Kazhdan and Hoppe
(ACM Trans. Graph. 2013), tell a density per vertex, and hold the interpreter meanwhile, so that
they do it in a process of their own. Quadric decimation removes first what changes the surface
least, so the fewest triangles that keep an error are found by halving and then by bisection.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from plyfile import PlyData, PlyElement

from gaussian_splatting.data.cameras import Camera
from sugar_extractors.mesh import poisson_process
from sugar_extractors.mesh.level_sets import Box, SurfaceSamples
from sugar_extractors.mesh.poisson_process import MESH, POINTS
from sugar_extractors.mesh.seams import joined_at_box
from sugar_extractors.mesh_quality import Surface
from sugar_scene import triangle_mesh as meshes
from sugar_scene.triangle_mesh import TriangleMesh
from sugar_utils import flags
from sugar_utils.errors import UserError, explained
from sugar_utils.libraries import load_pycolmap, run_alone
from sugar_utils.neighbors import nearest_neighbors_of
from sugar_utils.settings import flag

BACKENDS = ("auto", "open3d", "pycolmap")
POINT_WEIGHT = 2.0  # of points against smoothness: Open3D's choice, a parameter of pycolmap's
_KEEP_ALL = 1e-6
_MIN_RATIO = 1e-9
_PLACES = [(name, "<f4") for name in "xyz"]
_COLORS = ("red", "green", "blue")
SCALE = 1.1  # side of the solver's cube in sides of the points' bounding cube
USUAL_QUANTILE = 0.1  # of the original; of an object within its masks it would cut thin parts away
_flag = partial(flag, group="surface", no_effect_when="with --mesh_extractor tsdf")

Waiting = Callable[[int], None]  # hears of the memory in use
MIN_POINTS = 64  # fewer points in a region count as none: Poisson would make a blob of them
_QUERY_CHUNK = 1 << 20
_SAMPLED_POINTS = 10_000
_SOLVER = (poisson_process.__name__,)
WITHIN = 0.95  # of the vertices that have to keep the error
FEWEST_FACES = 64
_BISECTIONS = 3
_MOST_VERTICES = 200_000  # whose distance is measured


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
        no_effect_when="with --mesh_extractor tsdf; with "
        "--vertices_density_quantile 0, which asks for a closed surface",
    )

    def with_depth(self, points: np.ndarray, cameras: Sequence[Camera]) -> PoissonConfig:
        """The same with a number where the depth was left to the program."""
        if self.poisson_depth != flags.AUTO:
            return self
        return replace(self, poisson_depth=automatic_depth(points, pixel_size(points, cameras)))

    def resolved(self, has_hull: bool) -> PoissonConfig:
        """The same with a number where the share was left open; a hull cuts off what is outside."""
        if self.vertices_density_quantile is not None:
            return self
        return replace(self, vertices_density_quantile=0.0 if has_hull else USUAL_QUANTILE)


class PoissonMesh(NamedTuple):
    mesh: TriangleMesh  # screened Poisson surface of oriented points
    densities: np.ndarray  # support of each vertex; only their order is that of all backends, (V,)


@contextlib.contextmanager
def _enough_memory(step: str, named: str) -> Iterator[None]:
    """Lack of memory in a step in one line that names the flags which ask for less."""
    try:
        yield
    # Native code throws bad_alloc, which arrives as this, too.
    except MemoryError as error:
        raise UserError(
            f"out of memory in mesh extraction ({step}); lower {named}, close other programs, or "
            "use a machine with more memory"
        ) from error


class Open3dBackend:
    name = "open3d"

    def __init__(self, open3d: Any) -> None:
        self._o3d = open3d
        open3d.utility.set_verbosity_level(open3d.utility.VerbosityLevel.Error)

    @_enough_memory("reconstruct", "--poisson_depth or --surface_points")
    def reconstruct(
        self, samples: SurfaceSamples, config: PoissonConfig, waiting: Waiting
    ) -> PoissonMesh:
        threads = config.poisson_threads or -1
        options = {"depth": config.poisson_depth, "scale": SCALE, "n_threads": threads}
        with _work_folder() as folder:
            np.savez(folder / f"{POINTS}.npz", **vars(samples))
            run_alone(*_SOLVER, [self.name, str(folder), json.dumps(options)], waiting)
            with np.load(folder / f"{MESH}.npz") as found:
                mesh = _mesh_of(found["vertices"], found["faces"], found["colors"])
                return PoissonMesh(mesh, found["densities"])

    @_enough_memory("decimate", "--poisson_depth")
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
    """pycolmap, through files in the system's temporary folder, scaled to a cube for float32."""

    name = "pycolmap"

    @_enough_memory("reconstruct", "--poisson_depth or --surface_points")
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

    @_enough_memory("decimate", "--poisson_depth")
    def decimate(self, mesh: TriangleMesh, n_faces: int) -> TriangleMesh:
        """Quadric decimation; colours are those of the nearest vertex before."""
        if mesh.n_faces <= n_faces:
            return mesh
        pycolmap = load_pycolmap()
        options = pycolmap.MeshSimplificationOptions()
        options.target_face_ratio = max(n_faces / mesh.n_faces, _MIN_RATIO)
        middle, size = _cube_of(mesh.vertices)
        places = np.rec.fromarrays(((mesh.vertices - middle) / size).T, dtype=_PLACES)
        with _work_folder() as folder:
            meshes.write_faces(folder / "mesh.ply", places, mesh.faces)
            pycolmap.simplify_mesh(folder / "mesh.ply", folder / "small.ply", options)
            small = _read_result(folder / "small.ply")
        vertices = small.vertices * size + middle
        rows = _nearest_rows(vertices, mesh.vertices)
        return TriangleMesh(vertices, small.faces, mesh.colors[rows])


def _nearest_rows(queries: np.ndarray, points: np.ndarray) -> np.ndarray:
    """Row of the point that is nearest to each query. (Q,)"""
    tensors = (torch.from_numpy(rows.astype(np.float32)) for rows in (queries, points))
    return nearest_neighbors_of(*tensors, 1).indices[:, 0].numpy()


MeshingBackend = Open3dBackend | PycolmapBackend  # what mesh extraction asks of a geometry library


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


def _mesh_of(vertices: np.ndarray, faces: np.ndarray, colors: np.ndarray) -> TriangleMesh:
    colors = np.clip(np.rint(colors * 255), 0, 255).astype(np.uint8)
    return TriangleMesh(vertices.copy(), faces.astype(np.int64), colors)


@contextlib.contextmanager
def _work_folder() -> Iterator[Path]:
    what = f"cannot write in the temporary folder {tempfile.gettempdir()}:"
    how = {"prefix": "mesh-", "ignore_cleanup_errors": True}
    advice = "free some space or set TMPDIR"
    with explained(what, advice), tempfile.TemporaryDirectory(**how) as folder:
        yield Path(folder)


def _cube_of(points: np.ndarray) -> tuple[np.ndarray, float]:
    low = points.min(axis=0).astype(np.float64)
    high = points.max(axis=0).astype(np.float64)
    return (low + high) / 2, max(float((high - low).max()), 1e-12)


def _write_points(path: Path, samples: SurfaceSamples, middle: np.ndarray, size: float) -> None:
    kinds = [*_PLACES, *((n, "<f4") for n in ("nx", "ny", "nz")), *((n, "u1") for n in _COLORS)]
    columns = (*((samples.points - middle) / size).T, *samples.normals.T, *samples.colors.T)
    table = np.rec.fromarrays(columns, dtype=kinds)
    PlyData([PlyElement.describe(table, "vertex")], byte_order="<").write(str(path))


def _read_result(path: Path) -> TriangleMesh:
    if not path.is_file():
        raise UserError(
            "pycolmap made no mesh of the surface points; check free space in the temporary "
            f"folder {tempfile.gettempdir()}, or lower --poisson_depth"
        )
    return meshes.read_mesh_ply(path)


# of octrees whose depth is chosen by the program
LEAST_DEPTH = 4
MOST_DEPTH = 10

OUTLIER_NEIGHBORS = 20
OUTLIER_RATIO = 20.0


def outlier_mask(points: np.ndarray) -> np.ndarray:
    """Points, (P, 3), far from their neighbours: by mean distance, in standard deviations. (P,)"""
    cloud = torch.from_numpy(points)
    distances = np.empty(len(points), dtype=np.float64)
    for first in range(0, len(points), _QUERY_CHUNK):
        chunk = cloud[first : first + _QUERY_CHUNK]
        squares = nearest_neighbors_of(chunk, cloud, OUTLIER_NEIGHBORS).sq_distances
        distances[first : first + len(chunk)] = squares.double().sqrt().mean(dim=1).numpy()
    return distances > distances.mean() + OUTLIER_RATIO * distances.std(ddof=1)


def reconstruct_region(
    samples: SurfaceSamples,
    config: PoissonConfig,
    backend: MeshingBackend,
    waiting: Waiting = lambda n_bytes: None,
) -> TriangleMesh:
    """Mesh of one region, before decimation."""
    config = config.resolved(has_hull=False)
    outliers = outlier_mask(samples.points)
    if outliers.any():
        samples = samples.select(~outliers)
    mesh, densities = backend.reconstruct(samples, config, waiting)
    if config.vertices_density_quantile > 0 and mesh.n_vertices:
        keep = densities >= np.quantile(densities, config.vertices_density_quantile)
        if config.max_gap > 0:
            largest = config.max_gap * cell_size(samples.points, config.poisson_depth)
            keep &= gaps(mesh.vertices, samples.points) <= largest
        mesh = meshes.keep_vertices(mesh, keep)
    return mesh


def pixel_size(points: np.ndarray, cameras: Sequence[Camera]) -> float:
    """Median size of a pixel at points, (P, 3), in the view that is nearest to each."""
    some = points[:: max(1, len(points) // _SAMPLED_POINTS)]
    return float(np.median(nearest_pixel_sizes(some, cameras)))


def automatic_depth(points: np.ndarray, pixel: float) -> int:
    """Octree depth for ``--poisson_depth auto``. points: (P, 3); pixel: its size on the surface

    The cells are as small as a pixel, which nothing in the photographs is smaller than; a surface
    that crosses the whole cube, six sides of it, still has a point in each.
    """
    side = SCALE * float(np.ptp(points, axis=0).max())
    by_pixel = math.ceil(math.log2(max(side, pixel) / pixel)) if pixel > 0 else MOST_DEPTH
    by_points = round(math.log(max(len(points), 6) / 6, 4))
    return max(LEAST_DEPTH, min(by_pixel, by_points, MOST_DEPTH))


def cell_size(points: np.ndarray, depth: int) -> float:
    """Side of the finest octree cell in world units; points: (P, 3)"""
    return SCALE * float(np.ptp(points, axis=0).max()) / 2**depth


def gaps(vertices: np.ndarray, points: np.ndarray) -> np.ndarray:
    """Distance of each vertex to the nearest surface point. (V, 3), (P, 3) -> (V,) world units"""
    queries = torch.from_numpy(vertices.astype(np.float32))
    squares = nearest_neighbors_of(queries, torch.from_numpy(points), 1).sq_distances
    return squares[:, 0].sqrt().numpy()


def finish_mesh(
    regions: Sequence[TriangleMesh],
    decimate: Callable[[TriangleMesh], TriangleMesh],
    surface: SurfaceSamples | None,
    box: Box | None,
) -> TriangleMesh:
    """Decimate and clean each region, merge them, and snap vertices to surface points, if any.

    Args:
        box: Where foreground and background were cut; they are joined there.
    """
    parts = [meshes.clean_mesh(decimate(region)) for region in regions]
    joined = box is not None and len(parts) == 2
    mesh = joined_at_box(*parts, box) if joined else meshes.merge_meshes(parts)
    if surface is None:
        return meshes.with_vertex_normals(mesh)
    # Normals come before the clean-up, which drops faces that collapsed in the projection.
    return meshes.clean_mesh(meshes.with_vertex_normals(project_on_points(mesh, surface)))


def project_on_points(mesh: TriangleMesh, surface: SurfaceSamples) -> TriangleMesh:
    rows = _nearest_rows(mesh.vertices, surface.points)
    return TriangleMesh(surface.points[rows].astype(np.float64), mesh.faces, surface.colors[rows])


def nearest_pixel_sizes(points: np.ndarray, cameras: Sequence[Camera]) -> np.ndarray:
    """Size of a pixel at points, (P, 3), in the camera nearest to each. (P,) world units"""
    sizes = np.full(len(points), np.inf)
    for camera in cameras:
        distances = np.linalg.norm(points - camera.center, axis=1)
        np.minimum(sizes, distances / camera.fx, out=sizes)
    return sizes


def decimated_to_error(
    mesh: TriangleMesh,
    pixels: float,
    cameras: Sequence[Camera],
    n_faces: int,
    decimate: Callable[[TriangleMesh, int], TriangleMesh],
) -> TriangleMesh:
    """Decimate a mesh as far as 95 % of its vertices stay near the surface.

    Args:
        pixels: How near, in pixels of the camera nearest to a vertex.
        n_faces: Triangles at most, whatever the error.
    """
    points = mesh.vertices[:: max(1, mesh.n_vertices // _MOST_VERTICES)]
    limits = pixels * nearest_pixel_sizes(points, cameras)
    # Trees of triangles resolve best what is about as large as 1.
    origin = points.mean(axis=0)
    size = max(float(np.ptp(points, axis=0).max()), 1e-12)

    def keeps_error(candidate: TriangleMesh) -> bool:
        surface = Surface((candidate.vertices - origin) / size, candidate.faces)
        distances = surface.nearest((points - origin) / size).distances * size
        return float((distances <= limits).mean()) >= WITHIN

    best = decimate(mesh, n_faces)
    while True:
        few = best.n_faces // 2
        if few < FEWEST_FACES:
            return best
        smaller = decimate(best, few)
        if smaller.n_faces >= best.n_faces or not keeps_error(smaller):
            break
        best = smaller
    start = best
    low = few
    high = best.n_faces
    for _ in range(_BISECTIONS):
        middle = (low + high) // 2
        smaller = decimate(start, middle)
        if keeps_error(smaller):
            best = smaller
            high = middle
        else:
            low = middle
    return best
