# SPDX-License-Identifier: Apache-2.0
"""Self-tests of rasterizers: against the built-in one, and that one against recorded values."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from gaussian_splatting.core.cloud import Gaussians
from gaussian_splatting.core.random import generator
from gaussian_splatting.data.cameras import Camera
from gaussian_splatting.rasterization.projection import project
from gaussian_splatting.rasterization.projection_kernels import SPLAT_HEADER
from gaussian_splatting.rasterization.rasterizers import WARP, Rasterizer, Rows, SplatGradients
from gaussian_splatting.rasterization.render import rasterize

N_GAUSSIANS = 60
WIDTH = 21
HEIGHT = 35
STRIPS = (Rows(0, HEIGHT), Rows(17, 30))
"""The whole image, and a strip that begins and ends inside of a tile."""

# A splat just above the smallest alpha on one side and just below on the other makes a difference
# of 1/255 of its value.
MAX_ERROR = 8e-3  # largest difference of a pixel
MAX_GRADIENT_ERROR = 2e-2  # norm of the gradients' difference relative to their own
BLOCK = 7
MAX_BLOCK_ERROR = 1e-3
BLOCK_MEANS = (
    (0.3798, 0.3097, 0.2277, 1.5725, 0.6061),
    (0.1946, 0.1240, 0.1924, 0.9389, 0.3272),
    (0.0041, 0.0025, 0.0043, 0.0201, 0.0067),
    (0.1899, 0.1413, 0.1148, 0.8116, 0.2883),
    (0.0558, 0.0479, 0.0491, 0.2369, 0.0945),
    (0.1035, 0.0947, 0.1160, 0.7571, 0.2207),
    (0.0951, 0.0620, 0.0762, 0.5529, 0.1776),
    (0.1817, 0.1329, 0.1876, 0.8739, 0.3346),
    (0.3020, 0.2187, 0.2570, 1.8468, 0.5841),
    (0.0970, 0.0974, 0.0941, 0.5540, 0.2197),
    (0.1981, 0.1778, 0.2114, 1.1385, 0.3940),
    (0.2012, 0.1330, 0.1759, 1.1342, 0.3597),
    (0.0346, 0.0308, 0.0284, 0.1763, 0.0721),
    (0.1361, 0.0990, 0.1146, 0.6822, 0.2552),
    (0.0248, 0.0162, 0.0247, 0.1159, 0.0472),
)
"""Colour, depth and alpha of the test scene, block means of the float64 reference."""


@torch.no_grad()
def self_test(rasterizer: Rasterizer, device: torch.device) -> str | None:
    """Compare a rasterizer with the built-in one; return what is wrong, None if nothing is."""
    expected = _render(WARP, device)
    try:
        results = _render(rasterizer, device)
    # Another package's failure, whatever it is, is a reason not to use it.
    except Exception as error:
        message = " ".join(str(error).split())
        return f"it raised {type(error).__name__} ({message[:300]})"
    for name, values in expected.items():
        if not bool(results[name].isfinite().all()):
            return f"its {name} are not finite"
        difference = (results[name] - values).double()
        if name.startswith("gradients"):
            error = float(difference.norm() / values.double().norm())
            max_error = MAX_GRADIENT_ERROR
        else:
            error = float(difference.abs().max())
            max_error = MAX_ERROR
        if error > max_error:
            return f"its {name} differ by {error:.1e} from the built-in rasterizer's"
    return None


@torch.no_grad()
def reference_test(device: torch.device) -> str | None:
    """Compare the built-in rasterizer with recorded float64 values; None if nothing is wrong."""
    output = rasterize(_test_scene(device), _test_camera(), depth=True)
    pixels = torch.cat([output.image, output.depth[..., None], output.alpha[..., None]], dim=-1)
    blocks = pixels.cpu().double().unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))
    means = blocks.mean(dim=(1, 3)).reshape(-1, pixels.shape[2])
    expected = torch.tensor(BLOCK_MEANS, dtype=torch.float64, device="cpu")
    errors = (means - expected).abs().amax(dim=0).tolist()
    for name, error in zip(("image", "image", "image", "depth", "alpha"), errors, strict=True):
        # Written so that NaN is an error.
        if not error <= MAX_BLOCK_ERROR:
            return f"its {name} differs by {error:.1e} from the float64 reference"
    return None


def _render(rasterizer: Rasterizer, device: torch.device) -> dict[str, Tensor]:
    """Blend the strips of the test scene forward and backward; all results by name."""
    projection = project(_test_scene(device), _test_camera(), depth=True, normal=True)
    tiles = rasterizer.build_tile_lists(projection)
    background = torch.linspace(0.1, 0.6, projection.layout.total, device=device)
    results: dict[str, Tensor] = {}
    for rows in STRIPS:
        blended = rasterizer.blend_rows(projection.splats, tiles, background, rows)
        draws = generator(0, "rasterizer self-test", rows.start, rows.stop)
        shape = blended.pixels.shape
        d_pixels = torch.randn(shape, generator=draws, device="cpu").to(device)
        d_transmittance = torch.randn(shape[:2], generator=draws, device="cpu").to(device)
        # The backward pass may overwrite them.
        pixels = blended.pixels.clone()
        transmittance = blended.transmittance.clone()
        gradients = SplatGradients.zeros(projection)
        rasterizer.backpropagate_rows(
            projection.splats, tiles, blended, d_pixels, d_transmittance, gradients
        )
        suffix = f"of rows {rows.start} to {rows.stop}"
        results[f"pixels {suffix}"] = pixels
        results[f"transmittances {suffix}"] = transmittance
        results[f"gradients of centres {suffix}"] = gradients.means2d
        results[f"gradients of shapes {suffix}"] = gradients.splats[:, 2:5]
        results[f"gradients of opacities {suffix}"] = gradients.splats[:, 5]
        results[f"gradients of channels {suffix}"] = gradients.splats[:, SPLAT_HEADER:]
    return results


def _test_camera() -> Camera:
    return Camera(
        "self-test",
        WIDTH,
        HEIGHT,
        fx=30.0,
        fy=31.0,
        cx=WIDTH / 2 + 1.5,
        cy=HEIGHT / 2 - 2.0,
        rotation=np.eye(3),
        translation=np.zeros(3),
    )


def _test_scene(device: torch.device) -> Gaussians:
    """Gaussians in front of, beside and behind the camera, none as opaque as the caps of alpha."""
    draws = generator(0, "rasterizer self-test")
    n = N_GAUSSIANS

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draws, device="cpu")

    means = normal(n, 3) * torch.tensor([1.2, 1.0, 0.8], device="cpu")
    means[:, 2] += 3.0
    means[: n // 20, 2] *= -1.0
    quats = torch.nn.functional.normalize(normal(n, 4), dim=-1)
    scales = torch.exp(0.5 * normal(n, 3) - 2.2)
    opacities = torch.rand(n, generator=draws, device="cpu") * 0.9 + 0.03
    sh_dc = 0.5 * normal(n, 1, 3)
    sh_rest = 0.1 * normal(n, 15, 3)
    return Gaussians(
        means=means.to(device),
        quats=quats.to(device),
        scales=scales.to(device),
        opacities=opacities.to(device),
        sh_dc=sh_dc.to(device),
        sh_rest=sh_rest.to(device),
    )
