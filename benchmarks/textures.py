# SPDX-License-Identifier: Apache-2.0
"""Held-out quality of textured meshes: ``python benchmarks/textures.py SCENE OBJ [OBJ...]``.

Each mesh is rendered without light from the views that no run trained on, and compared with their
photographs where it covers them, inside of their masks. Sharpness is the energy of the gradients
of the render over that of the photograph. ``--lpips`` needs ``pip install lpips torchvision``.
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
from PIL import Image
from torch import Tensor

from benchmarks.rasterizer import print_machine, print_table
from gaussian_splatting.data.images import ImageStore, eroded
from gaussian_splatting.data.masks import MaskOptions
from gaussian_splatting.data.scene import load_scene
from gaussian_splatting.engine.reporting.evaluation import fitted_to, psnr, to_uint8
from sugar_extractors.texture.textured_mesh_io import read_textured_mesh, render_textured
from sugar_scene.triangle_rasterizer import rasterize_triangles
from sugar_trainers.capture import SugarSize
from sugar_utils.flags import Parser
from sugar_utils.frame import run_main


def gradient_energy(image: Tensor, inside: Tensor) -> float:
    """Sum of squared differences of neighbouring grey values. (H, W, 3) in [0, 1], (H, W) bool"""
    grey = image.double().mean(dim=2)
    across = (grey[:, 1:] - grey[:, :-1])[inside[:, 1:] & inside[:, :-1]]
    down = (grey[1:] - grey[:-1])[inside[1:] & inside[:-1]]
    return float(across.square().sum() + down.square().sum())


def scores(args: argparse.Namespace, path: Path) -> list[str]:
    """A row of the table."""
    scene = load_scene(args.scene, size_rule=SugarSize(), masks=MaskOptions(args.masks, "ignore"))
    mesh, rows = read_textured_mesh(path), []
    lpips = __import__("lpips").LPIPS(net="vgg", verbose=False) if args.lpips else None
    with ImageStore() as images:
        for view in scene.test_cameras:
            photograph = images.get(view)
            render = render_textured(mesh, view, supersampling=2)
            target = photograph[..., :3].float() / 255
            inside = rasterize_triangles(mesh.vertices, mesh.faces, view).covered
            share = float(inside.float().mean())
            if photograph.shape[2] == 4:
                inside &= photograph[..., 3] >= 250
            inside = eroded(inside, 2)
            if not inside.any():
                continue
            if args.pictures:
                args.pictures.mkdir(parents=True, exist_ok=True)
                beside = torch.cat([target, render * inside[..., None]], dim=1)
                name = f"{path.parent.name}_{Path(view.name).stem}.png"
                Image.fromarray(to_uint8(beside).numpy()).save(args.pictures / name)
            shown, real = render[inside][None], target[inside][None]
            energy = gradient_energy(render, inside) / gradient_energy(target, inside)
            row = [psnr(to_uint8(shown), real), psnr(fitted_to(shown, real), real), energy, share]
            if lpips is not None:
                pair = torch.stack(
                    [torch.where(inside[..., None], x, 0.0) for x in (render, target)]
                )
                row.append(float(lpips(*(pair.permute(0, 3, 1, 2) * 2 - 1).split(1))))
            rows.append(row)
    means = np.mean(rows, axis=0)
    figures = [f"{means[0]:.2f} dB", f"{means[1]:.2f} dB", f"{means[2]:.3f}", f"{means[3]:.0%}"]
    side = mesh.texture.shape[0]
    return [f"{mesh.n_faces:,}", f"{side}", *figures, *(f"{value:.3f}" for value in means[4:])]


def run() -> None:
    """What was asked for."""
    flags = Parser(description="Measure textures on held-out views.")
    flags.add_argument("scene", type=Path)
    flags.add_argument("meshes", type=Path, nargs="+", help="textured OBJs")
    flags.add_argument("--masks", help="folder of the masks")
    flags.add_argument("--lpips", action="store_true")
    flags.add_argument("--pictures", type=Path, help="folder for photographs beside renders")
    args = flags.parse_args()
    print_machine()
    head = ["mesh", "triangles", "side", "PSNR", "fitted", "sharpness", "covered"]
    rows = [[str(path.parent.name), *scores(args, path)] for path in args.meshes]
    print_table([*head, *(["LPIPS"] if args.lpips else [])], rows)


if __name__ == "__main__":
    sys.exit(run_main(run))
