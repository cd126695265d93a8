# SPDX-License-Identifier: Apache-2.0
"""The kernels of a run, loaded while it reads its inputs."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch

from gaussian_splatting.engine.runner import kernel_modules, n_workers
from sugar_utils.kernel_loading import loading_ahead


def kernels_ahead(device: torch.device) -> AbstractContextManager[None]:
    """Load all kernels that stages on a device may launch, for as long as the context is open."""
    return loading_ahead(kernel_modules(device.type == "cpu"), device, n_workers(device))
