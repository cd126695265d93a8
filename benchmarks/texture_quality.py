# SPDX-License-Identifier: Apache-2.0
"""Quality of textures: ``python benchmarks/texture_quality.py REFINED.pt -s SCENE -c CHECKPOINT``.

The mesh of a refined model is textured from the training views in several ways, rasterized into
the held-out views, and compared with their photographs. PSNR is given over the pixels that the
mesh covers and over whole images, as the mean over views. The ways:

- ``original``: pixels are scattered into texels, and of the pixels of one view that meet in a
  texel only one counts, as in the published program (its indexed assignment does not add up);
- ``scatter``: the same, where every pixel counts;
- ``gather``: every texel is projected into the views, as this program does it.

Texels and faces without a pixel are filled alike in all of them. ``Gaussians`` is the refined model
itself, rendered without view-dependent colour, for comparison.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import sugar_utils  # noqa: F401  before torch

# isort: split
import torch
from torch import Tensor

from gaussian_splatting.data.cameras import Camera
from gaussian_splatting.data.images import ImageStore
from gaussian_splatting.data.reference_layout import load_reference_checkpoint
from gaussian_splatting.data.scene import Scene, load_scene_for_checkpoint
from gaussian_splatting.engine.checkpoint import load_payload
from gaussian_splatting.engine.reporting.image_metrics import to_uint8
from sugar_extractors.texture.texture_atlas import ATLASES, Atlas, make_atlas
from sugar_extractors.texture.texture_baking import BakingConfig, ViewSource, bake_texture
from sugar_extractors.texture.textured_mesh_io import TexturedMesh
from sugar_extractors.texture.textured_rendering import render_textured
from sugar_extractors.texture.texturing import (
    face_colors,
    photo_source,
    refined_file,
    render_source,
)
from sugar_scene.mesh.triangle_rasterizer import rasterize_triangles
from sugar_scene.mesh_bound import BoundCloud, face_normals
from sugar_scene.trainable_bound import bound_cloud_from_state
from sugar_trainers.image_size import SugarSize
from sugar_utils.flags import Parser, integer, positive_float, positive_int
from sugar_utils.frame import run_main

METHODS = ("original", "scatter", "gather")


def scatter_texture(
    cloud: BoundCloud,
    atlas: Atlas,
    cameras: Sequence[Camera],
    source: ViewSource,
    *,
    every: bool,
    cosine_power: float,
) -> Tensor:
    """Texture from pixels scattered into texels; row 0 is at v = 1. (side, side, 3) uint8

    Args:
        cloud: The mesh.
        atlas: Where its faces lie.
        cameras: Views to take pixels from.
        source: Their pictures.
        every: Whether every pixel counts, or one per texel and view.
        cosine_power: Pixels weigh by this power of the cosine between ray and normal.
    """
    sums = torch.zeros(atlas.side**2, 4)
    face_sums = torch.zeros(atlas.n_faces, 4)
    for camera in cameras:
        hits = rasterize_triangles(cloud.vertices, cloud.faces, camera)
        faces = hits.face[hits.covered].long()
        weights = hits.barycentrics[hits.covered][..., None]
        at = (weights * atlas.corners[faces]).sum(dim=1).long().clamp(0, atlas.side - 1)
        texels = at[:, 1] * atlas.side + at[:, 0]
        colors = torch.nn.functional.pad(source(camera)[hits.covered], (0, 1), value=1.0)
        colors *= _cosines(cloud, faces, camera, weights)[:, None] ** cosine_power
        for total, rows in ((sums, texels), (face_sums, faces)):
            if every:
                total.index_add_(0, rows, colors)
            else:
                total[rows] += colors
    return _filled(sums, face_sums, cloud, atlas)


def _cosines(cloud: BoundCloud, faces: Tensor, camera: Camera, weights: Tensor) -> Tensor:
    triangles = cloud.vertices[cloud.faces[faces]]
    ray = (weights * triangles).sum(dim=1) - torch.tensor(camera.center).float()
    normals = face_normals(triangles)
    return (normals * torch.nn.functional.normalize(ray, dim=-1)).sum(dim=-1).abs()


def _filled(sums: Tensor, face_sums: Tensor, cloud: BoundCloud, atlas: Atlas) -> Tensor:
    means = face_sums[:, :3] / face_sums[:, 3:].clamp_min(1e-30)
    means = torch.where(face_sums[:, 3:] > 0, means, face_colors(cloud))
    owners = atlas.texel_faces(0, atlas.side).reshape(-1).long()
    behind = means[owners.clamp_min(0)]
    texels = torch.where(sums[:, 3:] > 0, sums[:, :3] / sums[:, 3:].clamp_min(1e-30), behind)
    return to_uint8(texels).reshape(atlas.side, atlas.side, 3).flip(0)


def held_out_psnr(
    render: Callable[[Camera], Tensor], cloud: BoundCloud, scene: Scene, images: ImageStore
) -> tuple[float, float]:
    """Mean PSNR over the held-out views: of covered pixels, of whole images. dB"""
    covered, whole = [], []
    for camera in scene.test_cameras:
        error = (render(camera) - images.get(camera).float() / 255) ** 2
        mask = rasterize_triangles(cloud.vertices, cloud.faces, camera).covered
        if mask.any():
            covered.append(-10 * math.log10(float(error[mask].double().mean())))
        whole.append(-10 * math.log10(float(error.double().mean())))
    return sum(covered) / max(1, len(covered)), sum(whole) / len(whole)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("refined", type=Path, help="refined .pt, or its folder")
    add("-s", "--scene_path", type=Path, required=True)
    add("-c", "--checkpoint_path", type=Path, required=True)
    add("-i", "--iteration_to_load", type=integer, default=7_000)
    add("--square_size", type=positive_int, default=8)
    add("--resolution_factor", type=positive_float, default=None)
    add("--atlases", nargs="+", choices=ATLASES, default=list(ATLASES))
    add("--sources", nargs="+", choices=("renders", "photos"), default=["renders", "photos"])
    add("--cosine_powers", nargs="+", type=float, default=[BakingConfig.cosine_power])
    return parser


@torch.no_grad()
def main() -> None:
    """Measure and print a table."""
    args = _parser().parse_args()
    cloud = bound_cloud_from_state(load_payload(refined_file(args.refined))["state_dict"])
    checkpoint = load_reference_checkpoint(args.checkpoint_path, args.iteration_to_load, print)
    scene = load_scene_for_checkpoint(
        args.scene_path, checkpoint, images_dir=checkpoint.images_dir,
        size_rule=SugarSize(resolution_factor=args.resolution_factor),
    )  # fmt: skip
    print(scene.description)
    print("source   atlas    way        cosine^  covered dB  whole dB  seconds")
    gaussians = cloud.activate()
    with ImageStore() as images:
        sources = {
            "renders": render_source(gaussians),
            "photos": photo_source(images, torch.device("cpu"), {}),
        }
        figures = held_out_psnr(sources["renders"], cloud, scene, images)
        print(f"{'':8} {'':8} {'Gaussians':10} {'':7}  {figures[0]:10.3f}  {figures[1]:8.3f}")
        for kind in args.atlases:
            atlas = make_atlas(kind, cloud.vertices, cloud.faces, args.square_size)
            for name in args.sources:
                _compare(args, cloud, scene, images, atlas, name, sources[name])


def _compare(
    args: argparse.Namespace,
    cloud: BoundCloud,
    scene: Scene,
    images: ImageStore,
    atlas: Atlas,
    name: str,
    source: ViewSource,
) -> None:
    for method in METHODS:
        for power in [0.0] if method == "original" else args.cosine_powers:
            start = time.monotonic()
            if method == "gather":
                texture = bake_texture(
                    cloud.vertices, cloud.faces, atlas, scene.train_cameras, source,
                    face_colors(cloud), BakingConfig(cosine_power=power),
                ).texture  # fmt: skip
            else:
                texture = scatter_texture(
                    cloud, atlas, scene.train_cameras, source,
                    every=method == "scatter", cosine_power=power,
                )  # fmt: skip
            seconds = time.monotonic() - start
            mesh = TexturedMesh(cloud.vertices, cloud.faces, atlas.uvs, texture)
            covered, whole = held_out_psnr(
                lambda camera, mesh=mesh: render_textured(mesh, camera), cloud, scene, images
            )
            print(
                f"{name:8} {atlas.kind:8} {method:10} {power:7g}  {covered:10.3f}  {whole:8.3f}  "
                f"{seconds:7.1f}",
                flush=True,
            )


if __name__ == "__main__":
    sys.exit(run_main(main))
