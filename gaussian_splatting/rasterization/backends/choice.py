# SPDX-License-Identifier: Apache-2.0
"""Choosing a rasterizer: the built-in one unless another is asked for and passes its self-test."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from gaussian_splatting.cloud import Gaussians
from gaussian_splatting.data.cameras import Camera
from gaussian_splatting.rasterization.backends.other_packages import load_gsplat, load_inria
from gaussian_splatting.rasterization.projection import project
from gaussian_splatting.rasterization.rasterizers import WARP, Rasterizer, Rows, SplatGradients
from gaussian_splatting.rasterization.reference import rasterize_reference
from gaussian_splatting.rasterization.render import rasterize
from sugar_utils.errors import UserError
from sugar_utils.random import generator

RASTERIZERS = ("auto", "warp", "gsplat", "inria")
_LOADERS = {"gsplat": load_gsplat, "inria": load_inria}


def choose_rasterizer(name: str, device: torch.device) -> tuple[Rasterizer, str]:
    """The rasterizer of a run, and one line that names it with the reason.

    ``auto`` is the built-in one on every device: it alone gives the same bits on every run, which
    resuming relies on, and needs no other package.

    Args:
        name: One of ``RASTERIZERS``.
    """
    if name == "auto":
        return WARP, "rasterizer: warp, built in; it gives the same bits on every run"
    if name == "warp":
        return WARP, "rasterizer: warp, by --rasterizer"
    if device.type != "cuda":
        raise UserError(
            f"--rasterizer {name} renders on CUDA devices only, and this run computes on the "
            f"{device.type.upper()}; leave the flag out"
        )
    try:
        rasterizer = _LOADERS[name]()
    except UserError as error:
        raise UserError(f"--rasterizer {name}: {error}") from error
    fault = self_test(rasterizer, device)
    if fault is not None:
        raise UserError(
            f"--rasterizer {name}: its self-test failed, {fault}; install a build for this torch "
            "and GPU, or leave the flag out"
        )
    return rasterizer, f"rasterizer: {name}, by --rasterizer; its self-test passed"


N_GAUSSIANS, WIDTH, HEIGHT = 60, 21, 35
STRIPS = (Rows(0, HEIGHT), Rows(17, 30))
"""The whole image, and a strip that begins and ends inside of a tile."""

MAX_ERROR, GRADIENT_ERROR = 8e-3, 2e-2
"""Largest difference of a pixel, and norm of the gradients' difference relative to their own.

A splat that one of the two just counts and the other just does not makes 1/255 of its value."""


@torch.no_grad()
def self_test(rasterizer: Rasterizer, device: torch.device) -> str | None:
    """Compare with the built-in rasterizer.

    Returns:
        What is wrong, None if nothing is.
    """
    expected = _render(WARP, device)
    try:
        found = _render(rasterizer, device)
    # Another package's failure, whatever it is, is a reason not to use it.
    except Exception as error:
        return f"it raised {type(error).__name__} ({' '.join(str(error).split())[:300]})"
    for name, values in expected.items():
        if not bool(found[name].isfinite().all()):
            return f"its {name} are not finite"
        difference = (found[name] - values).double()
        if name.startswith("gradients"):
            error = float(difference.norm() / values.double().norm())
            allowed = GRADIENT_ERROR
        else:
            error, allowed = float(difference.abs().max()), MAX_ERROR
        if error > allowed:
            return f"its {name} differ by {error:.1e} from the built-in rasterizer's"
    return None


@torch.no_grad()
def reference_test(device: torch.device) -> str | None:
    """Compare the built-in rasterizer with the dense float64 reference, forward only.

    Returns:
        What is wrong, None if nothing is.
    """
    scene, camera = _scene(device), _camera()
    found = rasterize(scene, camera, depth=True)
    doubles = Gaussians(*(tensor.double().cpu() for tensor in vars(scene).values()))
    expected = rasterize_reference(doubles, camera)
    for name in ("image", "depth", "alpha"):
        error = float((getattr(found, name).cpu() - getattr(expected, name)).abs().max())
        if not error <= MAX_ERROR:
            return f"its {name} differs by {error:.1e} from the float64 reference"
    return None


def _render(rasterizer: Rasterizer, device: torch.device) -> dict[str, Tensor]:
    projection = project(_scene(device), _camera(), depth=True, normal=True)
    tiles = rasterizer.build_tile_lists(projection)
    background = torch.linspace(0.1, 0.6, projection.layout.total, device=device)
    results = {}
    for rows in STRIPS:
        blended = rasterizer.blend_rows(projection.splats, tiles, background, rows)
        draws = generator(0, "rasterizer self-test", rows.start, rows.stop)
        shape = blended.pixels.shape
        d_pixels = torch.randn(shape, generator=draws, device="cpu").to(device)
        d_left = torch.randn(shape[:2], generator=draws, device="cpu").to(device)
        of = f"of rows {rows.start} to {rows.stop}"
        results[f"pixels {of}"] = blended.pixels.clone()
        results[f"transmittances {of}"] = blended.transmittance.clone()
        gradients = SplatGradients.zeros(projection)
        rasterizer.backpropagate_rows(
            projection.splats, tiles, background, blended, d_pixels, d_left, gradients
        )
        results[f"gradients of centres {of}"] = gradients.means2d
        for name, columns in (
            ("shapes", slice(2, 5)),
            ("opacities", 5),
            ("channels", slice(9, None)),
        ):
            results[f"gradients of {name} {of}"] = gradients.splats[:, columns]
    return results


def _camera() -> Camera:
    return Camera(
        name="self-test",
        width=WIDTH,
        height=HEIGHT,
        fx=30.0,
        fy=31.0,
        cx=WIDTH / 2 + 1.5,
        cy=HEIGHT / 2 - 2.0,
        rotation=np.eye(3),
        translation=np.zeros(3),
    )


def _scene(device: torch.device) -> Gaussians:
    """Gaussians before, beside and behind the camera, none as opaque as the caps of alpha."""
    draws = generator(0, "rasterizer self-test")
    n = N_GAUSSIANS

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draws, device="cpu")

    means = normal(n, 3) * torch.tensor([1.2, 1.0, 0.8], device="cpu")
    means[:, 2] += 3.0
    means[: n // 20, 2] *= -1.0
    tensors = (
        means,
        torch.nn.functional.normalize(normal(n, 4), dim=-1),
        torch.exp(0.5 * normal(n, 3) - 2.2),
        torch.rand(n, generator=draws, device="cpu") * 0.9 + 0.03,
        0.5 * normal(n, 1, 3),
        0.1 * normal(n, 15, 3),
    )
    return Gaussians(*(tensor.to(device) for tensor in tensors))
