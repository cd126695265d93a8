# SPDX-License-Identifier: Apache-2.0
"""Protocol of view synthesis: PSNR, SSIM and LPIPS of held-out views, as in the table of 3DGS.

Renders are rounded to 8 bits, as those of 3DGS are, which saves them as PNG before they are
compared (Kerbl et al., SIGGRAPH 2023, section 7). Every 8th image by name is held out, beginning
with the first, or the test split where a scene has one. LPIPS is that of VGG on colours in [0, 1],
and is measured only where its weights are.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from gaussian_splatting.data.cameras import Camera
from gaussian_splatting.data.images import ImageStore
from gaussian_splatting.engine.reporting import evaluation
from gaussian_splatting.engine.reporting.evaluation import to_uint8
from gaussian_splatting.rasterization import render_view
from gaussian_splatting.scenes.scene import Scene
from sugar_extractors.export.reading import read_gaussians_in_scene
from sugar_pipeline.quality.model_metrics import Perceptual, load_perceptual
from sugar_utils.device import choose_device, upload
from sugar_utils.errors import UserError, say_nothing


def score_views(scene: Scene, gaussians: Path, notify: Callable[[str], None]) -> dict[str, float]:
    """Measure the held-out views of a scene: ``psnr``, ``ssim``, and ``lpips`` with its weights.

    Args:
        gaussians: The PLY.
        notify: Gets a line where LPIPS is missing.

    Raises:
        UserError: No view is held out.
    """
    if not scene.test_cameras:
        raise UserError(f"{scene.root}: no view is held out, so there is nothing to measure")
    device = choose_device("auto", None).device
    model = read_gaussians_in_scene(gaussians, say_nothing).to(device).activate()
    perceptual = load_perceptual(notify)
    distances: list[float] = []
    with ImageStore(scene.white_background) as images:

        def render(camera: Camera) -> Tensor:
            output = render_view(model, camera, white=scene.white_background, geometry=False)
            assert output.image is not None
            if perceptual is not None:
                distances.append(_perceptual_distance(perceptual, output.image, camera, images))
            return output.image

        result = evaluation.score_views(render, scene.test_cameras, images.shown, quantise=True)
    scores = {"psnr": result.psnr, "ssim": result.ssim}
    if distances:
        scores["lpips"] = sum(distances) / len(distances)
    return scores


@torch.no_grad()
def _perceptual_distance(
    perceptual: Perceptual, image: Tensor, camera: Camera, images: ImageStore
) -> float:
    target = upload(images.shown(camera)[..., :3], image.device).float() / 255
    return perceptual(to_uint8(image).float() / 255, target)
