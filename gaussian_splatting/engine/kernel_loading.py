# SPDX-License-Identifier: Apache-2.0
"""The kernels of a run, loaded while it reads its inputs."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch

from gaussian_splatting.engine.runner import KERNEL_PACKAGES, kernel_modules, n_workers
from sugar_utils.kernel_loading import loading_ahead


def kernels_ahead(
    device: torch.device, packages: Sequence[str] = KERNEL_PACKAGES
) -> AbstractContextManager[None]:
    """Load the kernels that stages may launch on a device, for as long as the context is open.

    Args:
        device: Where the stages run.
        packages: Those whose kernels they launch.
    """
    modules = kernel_modules(device.type == "cpu", packages=packages)
    return loading_ahead(modules, device, n_workers(device))
