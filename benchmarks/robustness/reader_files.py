# SPDX-License-Identifier: Apache-2.0
"""Valid files of every kind that is read, and their readers, which return the numbers they read.

Other forms of valid files are cases of the tests of each reader.
"""

from __future__ import annotations

import gzip
import json
import shutil
import struct
import xml.etree.ElementTree as ET
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from benchmarks.robustness import world
from gaussian_splatting.core.cloud import GaussianCloud
from gaussian_splatting.core.moved import moved_cloud
from gaussian_splatting.data.images import decode_image, decode_mask
from gaussian_splatting.data.maps.depth_maps import DepthOptions
from gaussian_splatting.data.masks import MaskOptions
from gaussian_splatting.data.observations import ViewOptions
from gaussian_splatting.data.world_offset import write_offset
from gaussian_splatting.formats.placement import UP, Origin, Placement
from gaussian_splatting.formats.ply import (
    holds_gaussians,
    read_gaussian_ply,
    read_point_ply,
    write_gaussian_ply,
    write_point_ply,
)
from gaussian_splatting.formats.readers import read_gaussians
from gaussian_splatting.formats.sog import write_sog
from gaussian_splatting.formats.splat_file import write_splat
from gaussian_splatting.formats.spz import write_spz
from gaussian_splatting.scenes.reference_layout import (
    load_reference_checkpoint,
    read_exposures,
    write_exposures,
)
from gaussian_splatting.scenes.scene import (
    Scene,
    VanillaSize,
    load_scene,
    load_scene_for_checkpoint,
)
from gaussian_splatting.scenes.scene_path import scene_folder
from sugar_capture.known_cameras import read_cameras, the_cameras
from sugar_extractors.any_mesh import read_any_mesh
from sugar_extractors.export.gltf_gaussians import write_gltf_gaussians
from sugar_extractors.export.reading import has_gaussians, read_gaussians_in_scene
from sugar_extractors.export.usd.gaussians import write_usd_gaussians
from sugar_extractors.outputs.result_folder import FinalResults, write_result_folder
from sugar_extractors.placing import PlacementOptions
from sugar_extractors.results import capture_of
from sugar_pipeline.command_line import PROGRAMS
from sugar_scene.mesh_files.textured_mesh_io import read_textured_mesh
from sugar_scene.triangle_mesh import write_mesh_ply
from sugar_utils.errors import Notify, UserError, say_nothing
from sugar_utils.files import read_json
from tests.support import camera_files
from tests.support.gaussian_files import random_cloud, write_compressed
from tests.support.mesh_scenes import icosahedron
from tests.support.tiny_scene import TinyScene, make_tiny_checkpoint, make_tiny_scene

Numbers = dict[str, Any]
"""Arrays, tensors and lists of numbers by name."""

N_GAUSSIANS = 80
N_POINTS = 40
OFFSET = np.array([500_000.0, 4_000_000.0, 301.0])
MATRIX = np.array([[0.0, 2, 0, 1], [-2, 0, 0, -3], [0, 0, 2, 0.5], [0, 0, 0, 1]])
PLACED = "moved.ply"
SIZE = VanillaSize(-1)
SETTINGS: Mapping[str, object] = {
    "source_path": "scene",
    "model_path": "new",
    "iterations": 30,
    "resolution": 2.0,
    "eval": True,
    "masks": "none",
    "save_iterations": [10, 20],
    "depth_weight": 0.25,
}


def write_capture(root: Path) -> TinyScene:
    """Write a scene in every layout, with masks, depth and confidence maps in the first."""
    tiny = make_tiny_scene(root / "scene", 4, 60)
    write_point_ply(root / "points.ply", tiny.points.astype(np.float32), tiny.points_rgb)
    world.write_text_model(root)
    world.write_transforms(tiny, root)
    world.write_masks(root)
    (root / "masks").rename(root / "scene" / "masks")
    depths = root / "scene" / "depths"
    confidence = root / "scene" / "confidence"
    depths.mkdir()
    confidence.mkdir()
    for camera, suffix in zip(tiny.cameras, (".npy", ".tif", ".png", ".npy"), strict=True):
        depth = np.full((camera.height, camera.width), 3000, np.uint16)
        depth += np.arange(camera.width, dtype=np.uint16)
        levels = np.full(depth.shape, 2, np.uint8)
        stem = Path(camera.name).stem
        if suffix == ".npy":
            np.save(depths / f"{stem}.npy", depth)
            np.save(confidence / f"{stem}.npy", levels)
        else:
            Image.fromarray(depth).save(depths / f"{stem}{suffix}")
            Image.fromarray(levels).save(confidence / f"{stem}.png")
    return tiny


def read_scene(root: Path, notify: Notify) -> Numbers:
    """Read a scene with its photographs and maps."""
    scene = load_scene(
        root,
        size_rule=SIZE,
        eval_split=any(root.glob("transforms*.json")),
        notify=notify,
        masks=MaskOptions(),
        depths=DepthOptions(),
        view_options=ViewOptions(),
    )
    return numbers_of_scene(scene)


def numbers_of_scene(scene: Scene) -> Numbers:
    """Numbers of the cameras, photographs, masks, depth maps and points of a scene."""
    numbers: Numbers = {"points": scene.points, "offset": scene.offset}
    for camera in scene.cameras:
        name = camera.name
        numbers[f"{name}, rotation"] = camera.rotation
        numbers[f"{name}, translation"] = camera.translation
        numbers[f"{name}, lens"] = [camera.fx, camera.fy, camera.cx, camera.cy]
        numbers[f"{name}, pixels"] = decode_image(camera.image_path, camera.width, camera.height)
        if camera.mask is not None:
            numbers[f"{name}, mask"] = decode_mask(camera.mask, camera.width, camera.height)
        depth = scene.depths.maps.get(name)
        if depth is not None:
            numbers[f"{name}, depth"] = depth.values
    return numbers


def write_zip(root: Path) -> None:
    """Write a scene as a ZIP file."""
    write_capture(root / "capture")
    shutil.make_archive(str(root / "scan"), "zip", root / "capture", "scene")
    shutil.rmtree(root / "capture")


def read_zip(root: Path, notify: Notify) -> Numbers:
    """Read a scene in a ZIP file, which is unpacked into ``out``."""
    return read_scene(scene_folder(root / "scan.zip", [root / "out"], notify), notify)


def write_offset_scene(root: Path) -> None:
    """Write a scene from which an offset was subtracted before."""
    write_capture(root)
    write_offset(root / "scene", OFFSET)


def write_checkpoint(root: Path) -> None:
    """Write a scene and a vanilla checkpoint of it: ``cfg_args``, ``cameras.json``, exposures."""
    tiny = write_capture(root)
    checkpoint = make_tiny_checkpoint(root / "checkpoint", tiny)
    exposures = {camera.name: torch.tensor([[0.1] * 3, [0.01] * 3]) for camera in tiny.cameras}
    write_exposures(checkpoint / "exposure.json", exposures)


def read_checkpoint(root: Path, notify: Notify) -> Numbers:
    """Read a checkpoint, and its scene in the world of the checkpoint."""
    checkpoint = load_reference_checkpoint(root / "checkpoint", 7000, notify)
    scene = load_scene_for_checkpoint(
        root / "scene",
        checkpoint,
        images_dir=checkpoint.images_dir,
        size_rule=SIZE,
        eval_split=False,
        notify=notify,
    )
    numbers = numbers_of_scene(scene)
    numbers |= read_exposures(root / "checkpoint" / "exposure.json", notify)
    return numbers | checkpoint.read_cloud(notify).tensors()


def write_results(root: Path) -> None:
    """Write a result folder with its ``transform.json``."""
    write_capture(root)
    write_gaussian_ply(root / "splats.ply", random_cloud(N_GAUSSIANS))
    read_results(root, say_nothing)


def read_results(root: Path, notify: Notify) -> Numbers:
    """Complete a result folder, or write it again."""
    scene = load_scene(root / "scene", size_rule=SIZE, eval_split=False, notify=notify)
    results = FinalResults(None, root / "splats.ply", lambda: random_cloud(N_GAUSSIANS))
    write_result_folder(root / "out", results, scene, PlacementOptions())
    return {"matrix": read_json(root / "out" / "transform.json")["matrix"]}


def write_placed(root: Path) -> None:
    """Write Gaussians that were moved, and the record of it."""
    write_gaussian_ply(root / PLACED, moved_cloud(random_cloud(N_GAUSSIANS), MATRIX))
    placement = Placement(MATRIX, up=UP, origin=Origin(world_offset=OFFSET))
    text = json.dumps(placement.record(root))
    (root / f"{PLACED}.json").write_text(text, encoding="utf-8")


def read_placed(root: Path, notify: Notify) -> Numbers:
    """Read Gaussians that were moved in the coordinates of the scene."""
    capture_of([root / PLACED])
    return read_gaussians(root / PLACED, notify, OFFSET).tensors()


def write_settings(root: Path) -> None:
    """Write a file of settings for the vanilla stage."""
    lines = [f"{name} = {json.dumps(value)}\n" for name, value in SETTINGS.items()]
    (root / "settings.toml").write_text("".join(lines), encoding="utf-8")


def read_settings(root: Path, notify: Notify) -> Numbers:
    """Read values of flags from a file of settings; infinite ones are the stage's to refuse."""
    parser = PROGRAMS["gaussian_splatting/train.py"].make_parser(None)
    parser.parse_args(["--config", str(root / "settings.toml")])
    return {}


def _write_xmps(root: Path) -> None:
    for name, pose in zip(camera_files.NAMES, camera_files.POSES, strict=True):
        path = root / f"{Path(name).stem}.xmp"
        path.write_text(camera_files.xmp(*pose), encoding="utf-8")


def _write_text(name: str, make: Callable[[], str]) -> Callable[[Path], object]:
    return lambda root: (root / name).write_text(make(), encoding="utf-8")


CAMERAS: Mapping[str, Callable[[Path], object]] = {
    "metashape": _write_text("cameras.xml", camera_files.metashape),
    "metashape rig": _write_text(
        "cameras.xml", lambda: ET.tostring(camera_files.rig_xml(), encoding="unicode")
    ),
    "realityscan csv": _write_text(
        "cameras.csv", lambda: camera_files.CSV_HEADER + camera_files.reality_rows()
    ),
    "realityscan xmp": _write_xmps,
    "bundler": camera_files.bundler,
    "openmvg": _write_text(
        "sfm_data.json",
        lambda: json.dumps(camera_files.openmvg({"disto_k3": [0.03, -0.02, 0.005]})),
    ),
    "opensfm": _write_text(
        "reconstruction.json",
        lambda: json.dumps(camera_files.opensfm({"projection_type": "perspective", "focal": 0.8})),
    ),
    "polycam": camera_files.polycam,
    "record3d": _write_text("metadata.json", lambda: json.dumps(camera_files.record3d())),
}
"""Writers of cameras by the programs that write them."""


def read_program(program: str, root: Path, notify: Notify) -> Numbers:
    """Read the cameras of another program."""
    names = camera_files.NAMES
    if program == "record3d":
        names = [f"{number}.jpg" for number in range(len(names))]
    source = the_cameras(None, root)
    if source is None:
        notify("no cameras of another program")
        return {}
    known = read_cameras(source, camera_files.photographs(names))
    numbers: Numbers = {}
    for photograph, camera in zip(known.photographs, known.cameras, strict=True):
        numbers[f"{photograph.name}, center"] = camera.center
        numbers[f"{photograph.name}, rotation"] = camera.rotation
        numbers[f"{photograph.name}, lens"] = camera.lens.params
    for line in known.notes:
        notify(line)
    return numbers


def _write_spz2(path: Path, cloud: GaussianCloud) -> None:
    """Version 2, which differs from 3 in its rotations: x, y and z in a byte each."""
    write_spz(path, cloud)
    content = bytearray(gzip.decompress(path.read_bytes()))
    content[4:8] = struct.pack("<I", 2)
    first = 16 + len(cloud) * 16
    quats = torch.nn.functional.normalize(cloud.quats, dim=1)
    quats = torch.where(quats[:, :1] < 0, -quats, quats)[:, 1:].numpy()
    three = np.rint((quats + 1) * 127.5).clip(0, 255).astype(np.uint8)
    content[first : first + 4 * len(cloud)] = three.tobytes()
    path.write_bytes(gzip.compress(bytes(content), mtime=0))


GAUSSIANS: Mapping[str, Callable[[Path, GaussianCloud], object]] = {
    "a.ply": write_gaussian_ply,
    "b.compressed.ply": lambda path, cloud: write_compressed(path, cloud, 3),
    "v2.spz": _write_spz2,
    "v3.spz": write_spz,
    "v4.spz": lambda path, cloud: write_spz(path, cloud, version=4),
    "f.sog": write_sog,
    "g.splat": write_splat,
    "h.gltf.glb": write_gltf_gaussians,
    "i.usd": write_usd_gaussians,
}
"""Writers of Gaussians by the names of the files."""


def write_format(name: str, root: Path) -> None:
    """Write a file of ``GAUSSIANS``."""
    GAUSSIANS[name](root / name, random_cloud(N_GAUSSIANS))


def read_format(name: str, root: Path, notify: Notify) -> Numbers:
    """Read a file of ``GAUSSIANS``."""
    path = root / name
    is_ply = name.endswith(".ply")
    if not (holds_gaussians(path) if is_ply else has_gaussians(path)):
        raise UserError(f"{path}: holds no Gaussians; choose another file")
    if is_ply:
        return read_gaussian_ply(path, notify).tensors()
    return read_gaussians_in_scene(path, notify).tensors()


def write_points(root: Path) -> None:
    """Write coloured points."""
    points = np.random.default_rng(2).normal(size=(N_POINTS, 3)).astype(np.float32)
    write_point_ply(root / "points.ply", points, np.full((N_POINTS, 3), 100, np.uint8))


def read_points(root: Path, notify: Notify) -> Numbers:
    """Read points to start from."""
    points, colors = read_point_ply(root / "points.ply", notify)
    return {"points": points, "colors": colors}


def write_mesh(root: Path) -> None:
    """Write a mesh as PLY."""
    write_mesh_ply(root / "mesh.ply", icosahedron())


def read_mesh(root: Path, notify: Notify) -> Numbers:
    """Read a mesh without a texture."""
    mesh = read_any_mesh(root / "mesh.ply")
    return {"vertices": mesh.vertices, "faces": mesh.faces, "colors": mesh.colors}


def write_obj(root: Path) -> None:
    """Write an OBJ of two triangles, each with a material and a picture of its own."""
    lines = ["mtllib my mesh.mtl", "v 0 0 0", "v 1 0 0", "v 0 1 0", "v 1 1 1"]
    lines += ["vt 0.1 0.1", "vt 0.9 0.1", "vt 0.5 0.9"]
    lines += ["usemtl clay red", "f 1/1 2/2 3/3", "usemtl grün", "f 2/1 4/2 3/3", ""]
    materials = []
    for number, name in enumerate(("clay red", "grün")):
        materials += [f"newmtl {name}", "Kd 1 1 1", f"map_Kd picture {number}.png"]
        pixels = np.full((8 + 8 * number, 16, 3), 60 + 90 * number, np.uint8)
        Image.fromarray(pixels).save(root / f"picture {number}.png")
    (root / "mesh.obj").write_text("\n".join(lines), encoding="utf-8")
    (root / "my mesh.mtl").write_text("\n".join([*materials, ""]), encoding="utf-8")


def read_obj(root: Path, notify: Notify) -> Numbers:
    """Read a textured mesh."""
    mesh = read_textured_mesh(root / "mesh.obj")
    return {"vertices": mesh.vertices, "uvs": mesh.uvs, "texture": mesh.texture}
