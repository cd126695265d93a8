# SPDX-License-Identifier: Apache-2.0
"""Writes a result in the format of another program, upright and in metres if wanted."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import MISSING, dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from gaussian_splatting.cloud import GaussianCloud
from gaussian_splatting.data.ply import holds_gaussians, write_gaussian_ply
from gaussian_splatting.data.reference_layout import load_reference_checkpoint
from gaussian_splatting.data.scene import Scene
from gaussian_splatting.engine.model import cloud_from_state
from gaussian_splatting.formats import readers, spz
from gaussian_splatting.formats.fidelity import fidelity
from gaussian_splatting.formats.moved import GLB_AXES, moved_cloud, sh_rotation
from gaussian_splatting.formats.packing import require_gaussians
from gaussian_splatting.formats.sog import write_sog
from gaussian_splatting.formats.splat_file import write_splat
from sugar_extractors.export import gltf_gaussians, mesh_formats
from sugar_extractors.export.original_frame import require_original_frame, to_original_frame
from sugar_extractors.mesh_pictures import read_any_mesh
from sugar_extractors.results import capture_of, read_state, scene_of
from sugar_extractors.texture import textured_mesh_io
from sugar_extractors.texture.placed_export import (
    PlacementOptions,
    moved_points,
    placement,
)
from sugar_extractors.texture.textured_mesh_io import MeshStyle, mesh_files
from sugar_scene import mesh_bound
from sugar_scene.mesh_bound import BoundCloud
from sugar_scene.triangle_mesh import open_edge_share
from sugar_trainers.capture import SugarSize, model_file
from sugar_trainers.naming import OUTPUT_ROOT
from sugar_utils.console import Console
from sugar_utils.errors import Notify, UserError
from sugar_utils.files import atomic_path, check_writable, write_json_atomic
from sugar_utils.flags import boolean, positive_int
from sugar_utils.libraries import load_package
from sugar_utils.memory import format_bytes
from sugar_utils.settings import flag, parser_of

PRINTED = ("stl", "3mf")
GAUSSIANS = ("spz", "spz4", "sog", "splat", "ply", "gltf", "usd")
MESHES = ("glb", "obj", "usdz", *PRINTED)
_flag = partial(flag, group="export")
# What flags of the texture stage mean here, where they are not about a copy beside the mesh.
_MEANINGS = {
    "orient": "up: turn it upright, y up and standing on 0; needs the cameras of the capture",
    "scale_factor": "make it so many times as large",
    "known_distance": "make it metres: two photographs or two points x,y,z of the capture, and how "
    "many metres lie between the cameras or points",
}

# Writers say in which order they wrote the Gaussians, None for their own.
_WRITERS: dict[str, Callable[[Path, GaussianCloud], np.ndarray | None]] = {
    "spz": spz.write_spz,
    "spz4": partial(spz.write_spz, version=4),
    "sog": write_sog,
    "usd": mesh_formats.write_usd_gaussians,
    "splat": write_splat,
    "ply": write_gaussian_ply,
    "gltf": gltf_gaussians.write_gltf_gaussians,
}
_READERS: dict[str, Callable[[Path], GaussianCloud]] = {
    **dict.fromkeys((".usd", ".usda", ".usdc"), mesh_formats.read_usd_gaussians),
    ".glb": gltf_gaussians.read_gltf_gaussians,
}
_WITHOUT_ANTIALIASING = ("splat", "ply", "gltf", "usd")
"""Formats that have no word for it; all but ``splat`` keep it where this program reads it."""
_Y_UP = (*readers.Y_UP, ".glb", ".usd", ".usda", ".usdc")  # files whose y points up
Paths = Mapping[Path, Path]  # for each file the path to write to
_PART = 4096


@dataclass(frozen=True)
class ExportOptions:
    result: Path = _flag(
        MISSING,
        "what to export. Gaussians: a .ply, .spz, .sog, .splat, .glb or .usd, a .pt of "
        "any stage, a folder; meshes: a textured .obj",
        positional=True,
        parse=Path,
    )
    to: str = _flag(
        MISSING,
        "format. Gaussians: spz, for phones and web pages, a tenth of the size; spz4, its "
        "version 4; sog, for PlayCanvas; splat, without view-dependent colour; ply; "
        "gltf, with KHR_gaussian_splatting, y up, as NAME.gltf.glb; usd, a ParticleField. "
        "Textured meshes: glb, obj; usdz, for phones; stl and 3mf, for printers",
        choices=(*GAUSSIANS, *MESHES),
        missing=f"choose one of {', '.join((*GAUSSIANS, *MESHES))}",
    )
    output: Path | None = _flag(
        None,
        "file to write, NAME or NAME.FORMAT; unset: output/exports/NAME.FORMAT",
        short="-o",
        parse=Path,
    )
    max_triangles: int | None = _flag(
        None,
        "leave so many triangles of the mesh; the picture is made anew for them",
        parse=positive_int,
        no_effect_when="for Gaussians it is an error",
    )
    texture_size: int | None = _flag(
        None,
        "texels per side of the picture at most",
        parse=positive_int,
        no_effect_when="for Gaussians it is an error",
    )
    normal_map: bool = _flag(
        False,
        "write the normals of the mesh with all its triangles as a picture, for programs "
        "that light it",
        no_effect_when="it is an error without --max_triangles",
    )
    lit: bool = _flag(
        False,
        "viewers light the mesh, by a plain material (roughness 1, metallic 0); else they "
        "show the colours of the texture as they are",
        no_effect_when="unless --to glb",
    )
    repose: Path | None = _flag(
        None,
        "edited mesh of the refined model, an .obj with the same triangles: its Gaussians "
        "move along",
        parse=Path,
        no_effect_when="it is an error unless the result is a refined model",
    )
    scene_path: Path | None = _flag(
        None,
        "scene folder, for its cameras; unset: the one that the result's own record names",
        short="-s",
        parse=Path,
        no_effect_when="without --orient up, --known_distance and --original_frame",
    )
    checkpoint_path: Path | None = _flag(
        None,
        "vanilla checkpoint whose cameras.json says where the cameras are, for worlds that "
        "another program moved; unset: that of the record, or the cameras of the scene",
        short="-c",
        parse=Path,
        no_effect_when="without --orient up, --known_distance and --original_frame",
    )
    original_frame: bool = _flag(
        False,
        "in the coordinates of the original capture, where it lies far from the origin, as "
        "in UTM coordinates: PLY and OBJ in float64, GLB, glTF and USD by their node; needs the "
        "scene",
        parse=boolean,
        nargs="?",
        const=True,
    )
    overwrite: bool = _flag(False, "replace a file that is there")
    placement: PlacementOptions = field(default_factory=PlacementOptions)

    def __post_init__(self) -> None:
        output = self.output
        # A name of dots has no name that endings could be put behind.
        if output is not None and (output.is_dir() or not output.name.strip(".")):
            raise UserError(f"--output {output}: is a folder; name the file to write")
        if self.repose is not None and self.to not in GAUSSIANS:
            raise UserError(
                f"--repose makes Gaussians; choose --to {', '.join(GAUSSIANS)}, not {self.to}"
            )
        if self.original_frame:
            require_original_frame(self.to)
            if self.placement.wanted:
                raise UserError(
                    "--original_frame leaves everything where it was; leave out --orient, "
                    "--scale_factor and --known_distance"
                )
        if self.to in PRINTED and not self.placement.is_scaled:
            raise UserError(
                f"--to {self.to} is in millimetres: pass --known_distance, or --scale_factor with "
                "how many metres a unit of the capture is"
            )
        if self.to == "3mf":
            load_package("--to 3mf", "lxml", "lxml.etree", instead="use --to stl")
        if self.to in ("usdz", "usd"):
            mesh_formats.load_usd(f"--to {self.to}")
        given = [n for n in ("max_triangles", "texture_size") if getattr(self, n) is not None]
        if given and self.to in GAUSSIANS:
            raise UserError(f"--{given[0]} is for meshes; choose --to {', '.join(MESHES)}")
        if self.normal_map and (self.max_triangles is None or self.to not in ("glb", "obj")):
            raise UserError("--normal_map needs --max_triangles, and --to glb or obj")

    @property
    def target(self) -> Path:
        """The file to write; the format's suffix is put behind a name that lacks it."""
        suffix = {"gltf": "gltf.glb", "spz4": "spz"}.get(self.to, self.to)
        output = self.output
        if output is None:
            name = self.result.resolve()
            # The .pt of a run is called by an iteration; its folder says what it is.
            stem = name.parent.name if name.suffix == ".pt" else name.name.split(".")[0]
            return OUTPUT_ROOT / "exports" / f"{stem}.{suffix}"
        if output.suffix.lower() == Path(f"a.{suffix}").suffix:
            return output.with_suffix(output.suffix.lower())
        return output.with_name(f"{output.name}.{suffix}")


def export_parser(description: str | None) -> argparse.ArgumentParser:
    changes = {name: {"group": "export", "help": text} for name, text in _MEANINGS.items()}
    return parser_of(description, ExportOptions, **changes)


def read_any_gaussians(path: Path, notify: Notify) -> GaussianCloud:
    """Read a cloud of Gaussians in a capture's axes: :func:`read_as_written`, turned if need be."""
    cloud = read_as_written(path, notify)
    return moved_cloud(cloud, GLB_AXES) if path.suffix.lower() in _Y_UP else cloud


def read_as_written(path: Path, notify: Notify) -> GaussianCloud:
    """Read a cloud of Gaussians in the axes of the file; those bound to a mesh become free ones.

    Args:
        path: A PLY, SPZ, SOG, ``.splat``, GLB or USD of Gaussians; a ``.pt`` of any stage, or the
            folder of its run; or the folder of a vanilla checkpoint, whose last iteration is taken.
    """
    suffix = path.suffix.lower()
    if suffix in readers.READERS:
        return readers.READERS[suffix](path, notify)
    if suffix in _READERS:
        return _READERS[suffix](path)
    if path.is_dir() and not any(p.stem.isdigit() for p in path.glob("*.pt")):
        return load_reference_checkpoint(path, None, notify).read_cloud(notify)

    def build(state: dict[str, torch.Tensor]) -> GaussianCloud:
        if mesh_bound.FACES in state:
            return mesh_bound.bound_cloud_from_state(state).to_gaussians()
        return cloud_from_state(state)

    return read_state(model_file(path, "the path"), build)


def has_gaussians(path: Path) -> bool:
    """Whether a file or folder holds Gaussians, as opposed to a mesh or another thing."""
    suffix = path.suffix.lower()
    if suffix == ".ply":
        return holds_gaussians(path)
    known = suffix in (*_READERS, *readers.READERS, ".pt") and suffix != ".glb" or path.is_dir()
    return known or gltf_gaussians.holds_gltf_gaussians(path)


def read_bound_gaussians(path: Path) -> BoundCloud:
    if path.is_file() and path.suffix.lower() != ".pt":
        raise UserError(
            f"{path}: does not say which triangle carries which Gaussian; pass the .pt of the "
            "refinement, or the folder of its run"
        )
    return read_state(model_file(path, "the path"), mesh_bound.bound_cloud_from_state)


def export(options: ExportOptions, console: Console | None = None) -> Path:
    console = console or Console()
    if not options.result.exists():
        raise UserError(f"{options.result}: no such file or folder; check the path of the result")
    target = options.target
    gaussians = options.to in GAUSSIANS
    # The file that the export is called by comes first: an OBJ before its MTL and PNG.
    files = [target]
    if options.to == "obj":
        files = mesh_files(target, glb=False, normal_map=options.normal_map)[::-1]
    present = [path for path in files if path.exists()]
    if present and not options.overwrite:
        raise UserError(f"{present[0]}: is there already; pass --overwrite True, or --output")
    check_writable(target.parent)
    note = _beside(target, "json")
    binding = _beside(target, "binding.npz")
    beside = [note] * options.placement.wanted + [binding] * (options.repose is not None)
    with ExitStack() as stack:
        # All of them appear together, when everything is written; the first file is the last one.
        temporary = {p: stack.enter_context(atomic_path(p)) for p in (*files, *beside)}
        matrix = (_export_gaussians if gaussians else _export_mesh)(options, temporary, console)
        if options.original_frame:
            to_original_frame(temporary[target], options.to, _scene(options, console).offset)
        if note in temporary:
            meaning = "exported = matrix x (x, y, z, 1) of the capture; rows of 4"
            write_json_atomic(temporary[note], {"matrix": matrix.tolist(), "meaning": meaning})
    console.info(f"{format_bytes(sum(path.stat().st_size for path in files))}: {target}")
    return target


def _beside(target: Path, ending: str) -> Path:
    return target.with_name(f"{target.name}.{ending}")


def _export_gaussians(options: ExportOptions, temporary: Paths, console: Console) -> np.ndarray:
    if options.repose is not None:
        bound = read_bound_gaussians(options.result)
        cloud = reposed(bound, read_edited(options.repose, bound)).to_gaussians()
        binding = _beside(options.target, "binding.npz")
        write_binding(temporary[binding], bound)
        console.info(f"where each Gaussian sits on the mesh: {binding}")
    elif has_gaussians(options.result):
        cloud = read_any_gaussians(options.result, console.info)
    else:
        raise UserError(f"{options.result}: holds no Gaussians; choose --to glb or obj for a mesh")
    require_gaussians(options.result, cloud)
    matrix = _matrix(options, cloud.means.double().numpy(), console)
    matrix = _axes(options.to, options.placement.orient == "up") @ matrix
    cloud = cloud if np.array_equal(matrix, np.eye(4)) else moved_cloud(cloud, matrix)
    path = temporary[options.target]
    if cloud.antialiased and options.to in _WITHOUT_ANTIALIASING:
        console.info(
            f"note: these Gaussians are antialiased, which other programs cannot read from "
            f"{options.to}: they show those below a pixel too large; use --to spz or sog"
        )
    is_held = np.ones(len(cloud), bool)
    if options.to in ("spz", "spz4"):
        fit = spz.spz_fit(options.target, cloud)
        is_held = fit.is_held
        for line in fit.notes:
            console.info(line)
    order = _WRITERS[options.to](path, cloud)
    found = read_as_written(path, console.info)
    if len(found) == len(cloud) and is_held.any():
        written = cloud if order is None else cloud.select(torch.from_numpy(order))
        rows = torch.from_numpy(is_held)
        errors = fidelity(written.select(rows), found.select(rows))
        console.info(f"{len(cloud):,} Gaussians; {errors.line()}")
    return matrix


def _export_mesh(options: ExportOptions, temporary: Paths, console: Console) -> np.ndarray:
    to = options.to
    upright = options.placement.orient == "up"
    if options.result.suffix.lower() != ".obj":
        raise UserError(f"{options.result}: --to {to} needs the textured .obj of a refined model")
    mesh = textured_mesh_io.read_textured_mesh(options.result)
    matrix = _matrix(options, mesh.vertices.double().numpy(), console)
    if options.max_triangles is not None or options.texture_size is not None:
        mesh = mesh_formats.simplified(
            mesh, options.max_triangles, options.texture_size, options.normal_map
        )
    # The writers of OBJ and GLB turn axes on their own.
    total = _axes(to, upright) @ matrix
    own = matrix if to in ("glb", "obj") else total
    moved = moved_points(mesh.vertices.double().numpy(), own)
    mesh = replace(mesh, vertices=torch.from_numpy(moved.astype(np.float32)))
    path = temporary[options.target]
    if to in PRINTED:
        body = mesh_formats.closed_body(mesh_formats.shape_of(mesh))
        sides = " x ".join(f"{side:.1f}" for side in np.ptp(body.vertices, axis=0))
        gaps = open_edge_share(body)
        opened = f"{gaps:.2%} of its edges are open: close it before printing"
        console.info(f"{body.n_faces:,} triangles, {sides} mm, {opened if gaps else 'closed'}")
        mesh_formats.write_printable(path, body, to)
    elif to == "usdz":
        mesh_formats.write_usdz(path, mesh)
    elif to == "glb":
        style = MeshStyle(y_up=upright, lit=options.lit)
        textured_mesh_io.write_glb(path, mesh, options.target, style)
    else:
        files = mesh_files(options.target, glb=False, normal_map=options.normal_map)
        targets = {file: temporary[file] for file in files}
        textured_mesh_io.write_mesh_files(targets, mesh, MeshStyle(obj_normals=True))
    side = mesh.texture.shape[1]
    name = options.target.name
    console.info(f"{name}: {mesh.n_faces:,} triangles, {side} texels a side")
    return total


def _axes(to: str, upright: bool) -> np.ndarray:
    """From the axes of what was placed to those of a format. (4, 4)"""
    if to in PRINTED:
        turn = mesh_formats.Z_UP if upright else np.eye(4)
        return np.diag([*[mesh_formats.MILLIMETRES] * 3, 1.0]) @ turn
    turned = to in ("glb", "usdz", "gltf", "spz", "spz4", "usd") and not upright
    return GLB_AXES if turned else np.eye(4)


def _scene(options: ExportOptions, console: Console) -> Scene:
    """The capture that the result was made from."""
    capture = capture_of([options.result], options.scene_path, options.checkpoint_path)
    if capture.scene is None:
        raise UserError(
            "--original_frame, --orient up, and --known_distance where it is not by points x,y,z, "
            "need -s/--scene_path"
        )
    return scene_of(capture.scene, capture.checkpoint, SugarSize(), console.info)


def _matrix(options: ExportOptions, points: np.ndarray, console: Console) -> np.ndarray:
    if not options.placement.needs_cameras:
        return placement([], np.zeros((0, 3)), points, options.placement)
    scene = _scene(options, console)
    return placement(scene.calibrated_cameras, scene.points, points, options.placement)


# Each triangle carries its Gaussians at fixed barycentric coordinates, turned within its plane. So
# places and frames follow from the corners, sizes from the stretch of each triangle, and
# view-dependent colours turn with it.

_FLAT = 1e-12
_STILL = 1e-9


def reposed(cloud: BoundCloud, vertices: Tensor) -> BoundCloud:
    """Gaussians on the same triangles with their corners elsewhere. vertices: (V, 3) world units"""
    old = cloud.vertices.double()[cloud.faces]
    new = vertices.double()[cloud.faces]
    log_scales, rotations = _stretched(cloud, old, new)
    turns = mesh_bound.face_frames(new) @ mesh_bound.face_frames(old).transpose(1, 2)
    colors = _turned_colors(cloud.sh_rest, turns, cloud.per_triangle)
    shapes = {"log_scales": log_scales, "rotations": rotations}
    return replace(cloud, vertices=vertices.to(cloud.vertices), **shapes, sh_rest=colors)


def _stretched(cloud: BoundCloud, old: Tensor, new: Tensor) -> tuple[Tensor, Tensor]:
    """Sizes and rotations within the plane of triangles that were stretched."""
    before = _plane_edges(old)
    after = _plane_edges(new)
    one = torch.eye(2, dtype=before.dtype, device=before.device)
    flat = torch.linalg.det(before).abs() < _FLAT * before.square().sum(dim=(1, 2))
    flat = flat[:, None, None]
    stretch = after @ torch.linalg.inv(torch.where(flat, one, before))
    # A triangle without area says nothing about how it was stretched.
    stretch = torch.where(flat, one, stretch).repeat_interleave(cloud.per_triangle, dim=0)
    own = torch.nn.functional.normalize(cloud.rotations.double(), dim=1)
    real, imaginary = own.unbind(1)
    turn = torch.stack([real, -imaginary, imaginary, real], dim=1).reshape(-1, 2, 2)
    axes = stretch @ turn @ torch.diag_embed(cloud.log_scales.double().exp())
    same = ((stretch - one).abs().amax(dim=(1, 2)) < _STILL)[:, None]
    left, sizes, _ = torch.linalg.svd(axes)
    # Of the two axes the one that was the first stays the first.
    along = (left * axes[:, :, :1]).sum(dim=1).abs()
    swap = (along[:, 0] < along[:, 1])[:, None]
    sizes = torch.where(swap, sizes.flip(1), sizes)
    first = torch.where(same, own, torch.where(swap, left[:, :, 1], left[:, :, 0]))
    log_scales = torch.where(same, cloud.log_scales.double(), sizes.clamp_min(1e-12).log())
    return log_scales.to(cloud.log_scales), first.to(cloud.rotations)


def _plane_edges(triangles: Tensor) -> Tensor:
    """Two edges of each triangle in the axes of its plane, as columns. (F, 3, 3) -> (F, 2, 2)"""
    axes = mesh_bound.face_frames(triangles)[..., 1:]
    return ((triangles[:, 1:] - triangles[:, :1]) @ axes).transpose(1, 2)


def _turned_colors(sh_rest: Tensor, turns: Tensor, per_triangle: int) -> Tensor:
    """Coefficients after the rotation of each triangle. (G, 15, 3), (F, 3, 3) -> (G, 15, 3)"""
    n_bands = sh_rest.shape[1]
    rest = sh_rest.double().reshape(len(turns), per_triangle, n_bands, 3)
    one = torch.eye(3, dtype=turns.dtype, device=turns.device)
    moved = (turns - one).abs().amax(dim=(1, 2)) > _STILL
    # A triangle without area has no frame that colours could turn with.
    moved &= torch.linalg.det(turns) > 0.5
    for rows in moved.nonzero()[:, 0].split(_PART):
        bands = sh_rotation(turns[rows].cpu().numpy())[:, None, :n_bands, :n_bands].to(rest)
        rest[rows] = bands @ rest[rows]
    return rest.reshape(sh_rest.shape).to(sh_rest)


def read_edited(path: Path, cloud: BoundCloud) -> Tensor:
    """Vertices of an edited mesh, in the order of the model's. (V, 3)"""
    mesh = read_any_mesh(path)
    if mesh.n_vertices != cloud.vertices.shape[0] or mesh.n_faces != cloud.faces.shape[0]:
        raise UserError(
            f"{path}: {mesh.n_vertices} vertices and {mesh.n_faces} triangles, the refined model "
            f"has {cloud.vertices.shape[0]} and {cloud.faces.shape[0]}; only move vertices, and "
            "export with their order kept"
        )
    if not np.array_equal(mesh.faces, cloud.faces.cpu().numpy()):
        raise UserError(
            f"{path}: its triangles join other vertices than those of the refined model; export "
            "with the order of vertices kept"
        )
    return torch.from_numpy(mesh.vertices)


def write_binding(path: Path, cloud: BoundCloud) -> None:
    """Write which triangle carries each Gaussian and where, for other programs.

    A NumPy archive (``.npz``) with an entry per bound Gaussian, in the order of the PLY of the
    refined Gaussians, where the background follows: ``triangle`` (G,) int32, row of the face in the
    OBJ; ``barycentric`` (G, 3) float32, weights of its corners; ``rotation`` (G, 2) float32, unit
    complex number that turns the first axis from the direction of corner 2 to corner 1 towards
    normal x that direction; ``scale`` (G, 3) float32, deviations along normal and both axes, world
    units. ``faces`` (F, 3) int32 and ``vertices`` (V, 3) float32 are the mesh itself.
    """
    per_triangle = cloud.per_triangle
    n_faces = cloud.faces.shape[0]
    weights = np.array(mesh_bound.triangle_layout(per_triangle).barycentric, np.float32)
    rotations = torch.nn.functional.normalize(cloud.rotations, dim=1).cpu().numpy()
    with atomic_path(path) as temporary, temporary.open("wb") as file:
        np.savez_compressed(
            file,
            triangle=np.repeat(np.arange(n_faces, dtype=np.int32), per_triangle),
            barycentric=np.tile(weights, (n_faces, 1)),
            rotation=rotations.astype(np.float32),
            scale=cloud.activate().scales.detach().cpu().numpy().astype(np.float32),
            faces=cloud.faces.cpu().numpy().astype(np.int32),
            vertices=cloud.vertices.cpu().numpy().astype(np.float32),
        )
