# SPDX-License-Identifier: Apache-2.0
"""Choosing a rasterizer: the built-in one unless another is asked for and passes its self-test."""

from __future__ import annotations

import torch

from gaussian_splatting.rasterization.backends.gsplat import load_gsplat
from gaussian_splatting.rasterization.backends.inria import load_inria
from gaussian_splatting.rasterization.backends.self_test import self_test
from gaussian_splatting.rasterization.rasterizers import WARP, Rasterizer
from sugar_utils.errors import UserError

RASTERIZERS = ("auto", "warp", "gsplat", "inria")
_LOADERS = {"gsplat": load_gsplat, "inria": load_inria}


def choose_rasterizer(name: str, device: torch.device) -> tuple[Rasterizer, str]:
    """The rasterizer of a run, and one line that names it with the reason.

    ``auto`` is the built-in one on every device: it alone gives the same bits on every run, which
    resuming relies on, and needs no other package.

    Args:
        name: One of ``RASTERIZERS``.
        device: Where it will render.

    Raises:
        UserError: Another one was asked for and is missing, needs a GPU or fails its self-test.
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
