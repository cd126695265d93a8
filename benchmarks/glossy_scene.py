# SPDX-License-Identifier: Apache-2.0
"""A glossier copy of a scene: ``python benchmarks/glossy_scene.py FOLDER --scene SCENE``.

SCENE is a COLMAP capture with the exact mesh of its object, ``gt_object.ply``, as of the demo. To
its photographs the highlights of one more light are added, which move with the view (Blinn 1977):
strength times (n . h)^power in linear light, h halfway between the light and the line of sight.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import sugar_utils  # noqa: F401  before torch

# isort: split
import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import normalize

from benchmarks.relief_scene import parser
from gaussian_splatting.data.cameras import Camera, pixel_rays
from gaussian_splatting.data.color_spaces import light_of_srgb, srgb_of_light
from sugar_pipeline.api import load_scene
from sugar_scene.triangle_mesh import TriangleMesh, read_mesh_ply, with_vertex_normals
from sugar_scene.triangle_rasterizer import rasterize_triangles
from sugar_utils.entrypoint import run_main
from sugar_utils.errors import UserError

LIGHT = (0.45, -0.35, 0.82)  # direction towards it, world axes
POWER = 40.0
STRENGTH = 0.3
SAMPLES_PER_SIDE = 2
QUALITY = 95  # of JPEG files


def highlights(mesh: TriangleMesh, camera: Camera) -> Tensor:
    """Return the light that a view has more. Linear, (H, W)"""
    if mesh.normals is None:
        raise ValueError("a mesh without normals")
    n = SAMPLES_PER_SIDE
    sampled = camera.resized(n * camera.width, n * camera.height)
    vertices = torch.from_numpy(mesh.vertices).float()
    faces = torch.from_numpy(mesh.faces)
    hits = rasterize_triangles(vertices, faces, sampled)
    covered = hits.covered
    corners = faces[hits.face[covered].long()]
    corner_normals = torch.from_numpy(mesh.normals).float()[corners]
    normals = (hits.barycentrics[covered][..., None] * corner_normals).sum(dim=1)
    normals = normalize(normals, dim=1)
    rays = pixel_rays(sampled, dtype=torch.float32, device="cpu")[covered]
    to_eye = -normalize(rays @ torch.from_numpy(sampled.rotation).float(), dim=1)
    light = normalize(torch.tensor(LIGHT), dim=0)
    halfway = normalize(light + to_eye, dim=1)
    shine = (normals * halfway).sum(dim=1).clamp_min(0) ** POWER
    is_lit = (normals @ light) > 0
    sums = torch.zeros(covered.shape)
    sums[covered] = STRENGTH * shine * is_lit
    return sums.reshape(camera.height, n, camera.width, n).mean(dim=(1, 3))


def with_light(path: Path, added: np.ndarray) -> Image.Image:
    """Return a photograph with more light. added: linear, (H, W)"""
    values = np.asarray(Image.open(path).convert("RGB"), dtype=np.float64) / 255
    linear = np.minimum(light_of_srgb(values) + added[..., None], 1)
    return Image.fromarray(srgb_of_light(linear))


def run(args: argparse.Namespace) -> None:
    if args.folder.exists():
        raise UserError(f"{args.folder} exists; choose a new folder")
    if not (args.scene / "gt_object.ply").is_file():
        raise UserError(f"{args.scene}: no gt_object.ply; choose a scene with its exact mesh")
    mesh = with_vertex_normals(read_mesh_ply(args.scene / "gt_object.ply"))
    scene = load_scene(args.scene)
    shutil.copytree(args.scene, args.folder)
    for camera in scene.cameras:
        if camera.image_path is None:
            continue
        source = Path(camera.image_path)
        picture = with_light(source, highlights(mesh, camera).numpy())
        picture.save(args.folder / source.relative_to(args.scene), quality=QUALITY)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    flags = parser("Add the highlights of one more light to the photographs of a scene.")
    flags.add_argument("--scene", type=Path, required=True, help="that is copied")
    return flags.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(run_main(lambda: run(parse())))
