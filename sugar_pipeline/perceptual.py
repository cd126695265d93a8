# SPDX-License-Identifier: Apache-2.0
"""LPIPS, where its package and its network's weights are at hand (Zhang et al., CVPR 2018)."""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Callable

import torch
from torch import Tensor

Perceptual = Callable[[Tensor, Tensor], float]
"""Distance of two (H, W, 3) images with colours in [0, 1]."""


def load_perceptual(notify: Callable[[str], None]) -> Perceptual | None:
    """LPIPS with the VGG network, as papers of the field report it; None if it cannot be had.

    Its weights are downloaded by torchvision on first use, which needs a network.

    Args:
        notify: Told why there is none.
    """
    try:
        package = importlib.import_module("lpips")
        # The package prints where it found its weights.
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
            network = package.LPIPS(net="vgg", verbose=False).eval()
    # Weights come over the network: whatever goes wrong there must not cost the other figures.
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        notify(f"no LPIPS ({reason}); pip install lpips torchvision, and a network once, give it")
        return None

    @torch.no_grad()
    def distance(image: Tensor, target: Tensor) -> float:
        pair = (tensor.permute(2, 0, 1)[None].cpu() for tensor in (image, target))
        return float(network(*pair))

    return distance
