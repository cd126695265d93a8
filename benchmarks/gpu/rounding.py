# SPDX-License-Identifier: Apache-2.0
"""What fast exponentials and reciprocals cost in accuracy: ``python benchmarks/gpu/rounding.py``.

The CPU has none of a GPU's fast instructions. So their largest errors are put into the fibers'
functions instead: two units in the last place for exponentials, one for reciprocals, up or down by
a hash of the argument, or always up, which is worse than any hardware. Images and gradients of
Gaussians are held against the dense float64 reference, beside those of native code.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import sugar_utils  # noqa: F401  before torch

# isort: split
import torch
from torch import Tensor

from gaussian_splatting.cloud import Gaussians
from gaussian_splatting.rasterization import project
from gaussian_splatting.rasterization.rasterizers import WarpRasterizer, blend
from gaussian_splatting.rasterization.reference import rasterize_reference
from sugar_utils import warp_lanes
from sugar_utils.flags import Parser
from sugar_utils.frame import run_main
from tests.support.random_scenes import look_at, random_gaussians

WIDTH, HEIGHT = 45, 35
ULP = 1.2e-7
"""One unit in the last place, of float32 numbers just above a power of two."""

_SIGN = """
unsigned bits = __builtin_bit_cast(unsigned, x);
bits = (bits ^ (bits >> 16)) * 0x7feb352du;
const float sign = ((bits ^ (bits >> 15)) & 1) ? 1.0f : -1.0f;
"""
SIGNS = {"exact": "0.0f", "up or down": "sign", "always up": "1.0f"}


def _deep(gaussians: Gaussians) -> None:
    gaussians.opacities[:] = 0.02
    gaussians.scales[:] = 0.6


SCENES: dict[str, tuple[int, int, Callable[[Gaussians], None]]] = {
    "any": (200, 2, lambda _: None),
    "600 faint layers": (600, 2, _deep),
}
"""Number of Gaussians, seed, and what is done to them."""


def put_in_errors(sign: str) -> None:
    """Make the fibers' functions as wrong as those of a GPU may be; before any kernel is made."""
    gauss = f"{_SIGN} return ::expf(-0.5f * x) * (1.0f + {SIGNS[sign]} * {2 * ULP}f);"
    reciprocal = f"{_SIGN} return (1.0f / x) * (1.0f + {SIGNS[sign]} * {ULP}f);"
    warp_lanes.gauss.native_snippet = gauss
    warp_lanes.reciprocal_fast.native_snippet = reciprocal


def _scene(name: str, dtype: torch.dtype) -> Gaussians:
    n, seed, change = SCENES[name]
    gaussians = random_gaussians(n, seed, dtype)
    change(gaussians)
    return gaussians.as_leaves()


def errors(name: str, rasterizer: WarpRasterizer) -> list[float]:
    """Largest errors of image and gradients, each relative to the largest exact value."""
    camera = look_at((2.5, 1.2, 0.3), width=WIDTH, height=HEIGHT)
    color = torch.tensor([0.2, 0.5, 0.9])
    weights = torch.randn(HEIGHT, WIDTH, 3, generator=torch.Generator().manual_seed(0))
    exact, leaves = _scene(name, torch.float64), _scene(name, torch.float32)
    expected = rasterize_reference(exact, camera, color.double())
    pixels, light = blend(project(leaves, camera), color, rasterizer)
    ((expected.image * weights).sum() + expected.alpha.sum()).backward()
    ((pixels * weights).sum() - light.sum()).backward()
    pairs: list[tuple[Tensor, Tensor]] = [(pixels, expected.image)]
    pairs += [(a.grad, b.grad) for a, b in zip(leaves.tensors(), exact.tensors(), strict=True)]
    return [float((a.detach() - b.detach()).abs().max() / b.detach().abs().max()) for a, b in pairs]


def main() -> int:
    """Parse the flags and print."""
    flags = Parser(description="Errors of blending with the fast functions of GPUs, emulated.")
    flags.add_argument("--errors", choices=SIGNS, default="up or down", help="of these functions")
    args: argparse.Namespace = flags.parse_args()
    put_in_errors(args.errors)
    kinds = {"native": WarpRasterizer(), f"fibers, {args.errors}": WarpRasterizer(blocks=True)}
    print("| scene | kernels | image | means | quats | scales | opacities | sh_dc | sh_rest |")
    print("|---|---|--:|--:|--:|--:|--:|--:|--:|")
    for name in SCENES:
        for kind, rasterizer in kinds.items():
            cells = " | ".join(f"{error:.1e}" for error in errors(name, rasterizer))
            print(f"| {name} | {kind} | {cells} |")
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))
