# SPDX-License-Identifier: Apache-2.0
"""Textures and silhouettes of meshes in the held-out views.

``python benchmarks/held_out.py KIND SCENE RESULT [RESULT...]``:

- ``textures``: textured OBJs without light against the photographs, where mesh and mask cover
  them. Sharpness is the energy of the gradients over that of the photographs.
- ``silhouettes``: silhouettes of meshes against masks. Intersection over union, and the share of
  the mask's area that lies outside of it (outside) or is not covered (missing).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import sugar_utils  # noqa: F401  before torch

# isort: split
import numpy as np
import torch
from torch import Tensor

from benchmarks.rasterizer import print_machine, print_table
from gaussian_splatting.data.cameras import Camera
from gaussian_splatting.data.images import ImageStore, eroded
from gaussian_splatting.data.masks import MaskOptions
from gaussian_splatting.engine.reporting.evaluation import fitted_to, psnr, to_uint8
from gaussian_splatting.scenes.scene import load_scene
from sugar_extractors.any_mesh import read_any_mesh
from sugar_scene.mesh_files.textured_mesh_io import read_textured_mesh, render_textured
from sugar_scene.triangle_rasterizer import rasterize_triangles
from sugar_trainers.capture import SugarSize
from sugar_utils.entrypoint import run_main
from sugar_utils.errors import UserError
from sugar_utils.flags import Parser, positive_float


def held_out_views(args: argparse.Namespace) -> list[Camera]:
    """Views of a scene that no run trained on, with their masks."""
    size = SugarSize(resolution_factor=args.resolution_factor)
    scene = load_scene(args.scene, size_rule=size, masks=MaskOptions(args.masks, "ignore"))
    if args.run is textures:
        return scene.test_cameras
    views = [camera for camera in scene.test_cameras if camera.mask is not None]
    if not views:
        raise UserError(f"{args.scene}: no held-out view has a mask; name them with --masks")
    return views


def silhouettes(args: argparse.Namespace) -> None:
    """Compare silhouettes with masks."""
    views, rows = held_out_views(args), []
    with ImageStore() as images:
        masks = [images.get(view)[..., 3] >= 128 for view in views]
    for number, path in enumerate(args.models, start=1):
        mesh = read_any_mesh(path)
        vertices = torch.tensor(mesh.vertices, dtype=torch.float32)
        faces, figures = torch.tensor(mesh.faces), []
        for view, mask in zip(views, masks, strict=True):
            shown = rasterize_triangles(vertices, faces, view).covered
            both, area = int((shown & mask).sum()), int(mask.sum())
            outside, missing = int((shown & ~mask).sum()), int((mask & ~shown).sum())
            figures.append((both / (both + outside + missing), outside / area, missing / area))
        iou, outside, missing = np.mean(figures, axis=0)
        print(f"[{number}] {path}")
        rows.append(
            [
                f"[{number}]",
                f"{mesh.n_faces:,}",
                f"{iou:.4f}",
                f"{np.min(figures, 0)[0]:.4f}",
                f"{outside:.2%}",
                f"{missing:.2%}",
            ]
        )
    print()
    print_table(["mesh", "triangles", "IoU", "smallest", "outside", "missing"], rows)


def gradient_energy(image: Tensor, inside: Tensor) -> Tensor:
    """Sum of squared differences of neighbouring grey values. (H, W, 3), (H, W) bool -> ()"""
    grey = image.double().mean(dim=2)
    across = (grey[:, 1:] - grey[:, :-1])[inside[:, 1:] & inside[:, :-1]]
    down = (grey[1:] - grey[:-1])[inside[1:] & inside[:-1]]
    return across.square().sum() + down.square().sum()


def textures(args: argparse.Namespace) -> None:
    """Compare textured meshes with photographs where they cover them."""
    views, rows = held_out_views(args), []
    for path in args.models:
        mesh, figures = read_textured_mesh(path), []
        for view in views:
            with ImageStore() as images:
                photograph = images.get(view)
            image = render_textured(mesh, view, supersampling=2)
            covered = rasterize_triangles(mesh.vertices, mesh.faces, view).covered
            counted = photograph.shape[2] == 3 or photograph[..., 3] >= 250
            inside, target = eroded(covered & counted, 2), photograph[..., :3] / 255
            if not inside.any():
                continue
            shown, real = image[inside][None], target[inside][None]
            sharpness = gradient_energy(image, inside) / gradient_energy(target, inside)
            fitted = psnr(fitted_to(shown, real), real)
            shares = float(sharpness), float(covered.float().mean())
            figures.append((psnr(to_uint8(shown), real), fitted, *shares))
        means = np.mean(figures, axis=0)
        print(f"[{len(rows) + 1}] {path}")
        rows.append(
            [
                f"[{len(rows) + 1}]",
                f"{mesh.n_faces:,}",
                f"{len(mesh.texture)}",
                f"{means[0]:.2f} dB",
                f"{means[1]:.2f} dB",
                f"{means[2]:.3f}",
                f"{means[3]:.0%}",
            ]
        )
    print()
    head = ["mesh", "triangles", "side", "PSNR", "after gain and offset", "sharpness", "covered"]
    print_table(head, rows)


def parser() -> Parser:
    flags = Parser(description="Measure results in held-out views.")
    kinds = flags.add_subparsers(dest="kind", required=True, parser_class=Parser)
    for function in (textures, silhouettes):
        one = kinds.add_parser(function.__name__)
        one.set_defaults(run=function)
        one.add_argument("scene", type=Path, help="scene folder")
        one.add_argument("models", type=Path, nargs="+", help="meshes")
        one.add_argument("--masks", help="folder of the masks")
        one.add_argument("--resolution_factor", type=positive_float, default=1.0)
    return flags


def run() -> None:
    args = parser().parse_args()
    print_machine()
    args.run(args)


if __name__ == "__main__":
    sys.exit(run_main(run))
