# SPDX-License-Identifier: Apache-2.0
"""What wrong poses cost and ``--refine_poses`` wins back: ``python benchmarks/poses.py SCENE``.

The poses of the training photographs are turned and shifted at random; those of the held-out ones
are not, so the figures are of new views in the true world. Vanilla 3DGS is trained with the same
budget and seed on true and on wrong poses, as they are and learned. Held-out views are measured in
their true poses, and in those in which the finished model shows them best: a world whose poses were
learned may have bent by a pixel.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import sugar_utils  # noqa: F401  before torch

# isort: split
import torch
from torch import Tensor

from benchmarks.rasterizer import print_machine, print_table
from gaussian_splatting.data.cameras import Camera
from gaussian_splatting.data.colmap import find_model
from gaussian_splatting.data.colmap_poses import write_poses
from gaussian_splatting.data.images import ImageStore
from gaussian_splatting.data.ply import read_gaussian_ply
from gaussian_splatting.data.scene import Scene, load_scene
from gaussian_splatting.engine.pose_fit import fitted_pose
from gaussian_splatting.engine.poses import with_motion
from gaussian_splatting.engine.rendering import plain_background, render_view
from gaussian_splatting.engine.reporting.evaluation import evaluate
from gaussian_splatting.engine.reporting.view_findings import POSED
from gaussian_splatting.optim.densification import DensificationConfig
from gaussian_splatting.optim.schedule import LearningRates
from gaussian_splatting.vanilla.vanilla_config import VanillaConfig
from gaussian_splatting.vanilla.vanilla_run import VanillaOptions, train_vanilla
from sugar_trainers.image_size import SugarSize
from sugar_utils.flags import HelpFormatter, Parser, positive_float, positive_int
from sugar_utils.frame import run_main


def disturbed(cameras: list[Camera], degrees: float, share: float, extent: float) -> list[Camera]:
    """Cameras turned by an angle and shifted by a share of the extent, each another way."""
    rng = torch.Generator().manual_seed(0)
    directions = torch.randn(len(cameras), 2, 3, generator=rng, dtype=torch.float64)
    directions = torch.nn.functional.normalize(directions, dim=2)
    sizes = torch.tensor([torch.deg2rad(torch.tensor(degrees)), share], dtype=torch.float64)
    motions = (directions * sizes[:, None]).reshape(len(cameras), 6)
    return [with_motion(c, m, extent) for c, m in zip(cameras, motions, strict=True)]


def disturbed_copy(root: Path, scene: Scene, target: Path, degrees: float, share: float) -> Path:
    """A scene folder with the same photographs and wrong poses of those to train on."""
    wrong = disturbed(scene.original_train_cameras, degrees, share, scene.extent)
    target.mkdir()
    (target / "images").symlink_to(root / "images")
    write_poses(find_model(root), target / "sparse", wrong)
    return target


def held_out_psnr(options: VanillaOptions) -> tuple[float, float]:
    """Train, and measure the held-out views in their true poses and in those that fit best. dB"""
    gaussians = read_gaussian_ply(train_vanilla(options)).activate()
    scene = load_scene(options.source_path, size_rule=options.size, eval_split=True)
    black = plain_background(False, gaussians.means.device)

    def render(camera: Camera) -> Tensor:
        return render_view(gaussians, camera, white=False, geometry=False).image

    with ImageStore() as images:
        known = scene.test_cameras
        moved = [fitted_pose(gaussians, c, images.get(c), scene.extent, black) for c in known]
        plain, posed = (evaluate(render, c, images.get, quantise=True) for c in (known, moved))
    return plain.psnr, posed.psnr


def options_of(args: argparse.Namespace, scene: Path, output: Path, learn: bool) -> VanillaOptions:
    """One run on a short schedule that leaves Gaussians time to recover from resets."""
    n = args.iterations
    config = VanillaConfig(
        iterations=n,
        rates=LearningRates(position_lr_max_steps=n),
        densification=DensificationConfig(
            densify_from_iter=n // 10,
            densify_until_iter=n // 2,
            opacity_reset_interval=n,
        ),
        sh_interval=n // 4,
        refine_poses=learn,
    )
    return VanillaOptions(
        source_path=scene,
        model_path=output,
        size=SugarSize(resolution_factor=args.resolution_factor),
        eval=True,
        config=config,
        test_iterations=(),
        save_iterations=(),
    )


def run(args: argparse.Namespace) -> None:
    """Train three times and print what the poses cost."""
    print_machine()
    whole = load_scene(args.scene, size_rule=SugarSize(), eval_split=True, notify=print)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        wrong = disturbed_copy(args.scene, whole, root / "wrong", args.degrees, args.share)
        psnr = {
            name: held_out_psnr(options_of(args, scene, root / name, learn))
            for name, scene, learn in (
                ("true poses", args.scene, False),
                ("wrong poses", wrong, False),
                ("wrong poses, learned", wrong, True),
                ("true poses, learned", args.scene, True),
            )
        }
    best, worst = psnr["true poses"], psnr["wrong poses"]
    rows = []
    for name, values in psnr.items():
        back = [(v - w) / (b - w) for v, w, b in zip(values, worst, best, strict=True)]
        shown = zip(values, back, strict=True)
        rows.append([name, *(t for v, s in shown for t in (f"{v:.2f}", f"{100 * s:.0f} %"))])
    back = "of the loss won back"
    print_table(["poses", "held-out PSNR (dB)", back, POSED, back], rows)


def parser() -> Parser:
    """The flags."""
    flags = Parser(description=__doc__, formatter_class=HelpFormatter)
    flags.add_argument("scene", type=Path, help="scene folder with a COLMAP model")
    flags.add_argument("--iterations", type=positive_int, default=2_000, help="of each run")
    flags.add_argument("--resolution_factor", type=positive_float, default=2.0, help="divisor")
    flags.add_argument("--degrees", type=positive_float, default=0.5, help="turn of each camera")
    flags.add_argument("--share", type=positive_float, default=0.01, help="shift in extents")
    return flags


if __name__ == "__main__":
    sys.exit(run_main(lambda: run(parser().parse_args())))
