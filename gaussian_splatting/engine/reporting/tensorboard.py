# SPDX-License-Identifier: Apache-2.0
"""What a run writes for TensorBoard: curves, histograms and pictures."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gaussian_splatting.engine.reporting.evaluation import to_uint8
from sugar_utils.errors import printable
from sugar_utils.random import generator

MAX_HISTOGRAM_VALUES = 100_000
Activation = Callable[[Tensor], Tensor]


class RunLogger:
    """Writes TensorBoard event files of one run; does nothing when disabled.

    TensorBoard is imported at construction. Where it is missing, and when the disk is full later,
    one warning is given and training goes on without.

    Args:
        first_iteration: First iteration of this process when it continues a run. Viewers drop what
            the earlier process wrote from there on, so that curves do not double back. None for
            a fresh run.
    """

    def __init__(
        self,
        directory: Path,
        first_iteration: int | None = None,
        enabled: bool = True,
        notify: Callable[[str], None] = lambda message: None,
    ) -> None:
        self._notify = notify
        self._writer: Any = None
        if not enabled:
            return
        try:
            from gaussian_splatting.engine.reporting.event_file import DirectSummaryWriter
        except ImportError as error:
            notify(f"no TensorBoard logs ({error}); pip install tensorboard to have them")
            return
        try:
            self._writer = DirectSummaryWriter(directory, first_iteration)
        except OSError as error:
            notify(f"no TensorBoard logs: cannot write {directory}: {error.strerror or error}")

    @property
    def enabled(self) -> bool:
        """Whether anything is written; callers skip preparing values when not."""
        return self._writer is not None

    def scalars(self, values: Mapping[str, float | Tensor], iteration: int) -> None:
        """Add one point to each curve; tensors on a device are read with one copy."""
        if not self.enabled:
            return
        for name, value in _read_off(values).items():
            self._write("add_scalar", printable(name), value, iteration)

    def histograms(
        self,
        tensors: Mapping[str, Tensor],
        iteration: int,
        activations: Mapping[str, Activation] | None = None,
    ) -> None:
        """Add the distribution of values of each tensor.

        At most ``MAX_HISTOGRAM_VALUES`` are drawn from a tensor, the same ones whenever the run is
        repeated. Values that are not finite are left out, and so are tensors without others.
        """
        if not self.enabled:
            return
        for name, tensor in tensors.items():
            values = subsample(tensor, name, iteration, (activations or {}).get(name))
            if values.size > 0:
                self._write("add_histogram", printable(name), values, iteration)

    def images(self, images: Mapping[str, Tensor | np.ndarray], iteration: int) -> None:
        """Add pictures.

        Args:
            images: (H, W, 3) or (H, W), uint8 or float in [0, 1] (clamped, NaN shown black), by
                name.
        """
        if not self.enabled:
            return
        for name, image in images.items():
            pixels = torch.as_tensor(image).detach()
            if pixels.dtype.is_floating_point:
                pixels = torch.nan_to_num(pixels, nan=0.0)
            array = to_uint8(pixels).cpu().numpy()
            layout = "HW" if array.ndim == 2 else "HWC"
            self._write("add_image", printable(name), array, iteration, dataformats=layout)

    def flush(self) -> None:
        """Bring what was logged to the disk, for example before a checkpoint."""
        if self.enabled:
            self._write("flush")

    def close(self) -> None:
        """Flush and end the event file."""
        if self.enabled:
            self._write("close")
            self._writer = None

    def __enter__(self) -> RunLogger:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _write(self, method: str, *args: Any, **kwargs: Any) -> None:
        if self._writer is None:
            return
        try:
            getattr(self._writer, method)(*args, **kwargs)
        except OSError as error:
            writer, self._writer = self._writer, None
            writer.abandon()
            self._notify(f"TensorBoard logs are not continued: {error.strerror or error}")


def subsample(
    tensor: Tensor, name: str, iteration: int, activation: Activation | None = None
) -> np.ndarray:
    """At most ``MAX_HISTOGRAM_VALUES`` finite values of a tensor, chosen by name and iteration.

    Returns:
        float32, in one dimension.
    """
    flat = tensor.detach().reshape(-1)
    if flat.numel() > MAX_HISTOGRAM_VALUES:
        # Random, not every n-th: a stride that is a multiple of 3 would see only the x of xyz.
        draws = generator(0, "histogram", name, iteration)
        chosen = torch.randint(flat.numel(), (MAX_HISTOGRAM_VALUES,), generator=draws, device="cpu")
        flat = flat[chosen.to(flat.device)]
    values = (flat.float() if activation is None else activation(flat.float())).cpu()
    return values[values.isfinite()].numpy()


def _read_off(values: Mapping[str, float | Tensor]) -> dict[str, float]:
    """All values as numbers, waiting for the device once."""
    tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
    numbers = dict(values)
    if tensors:
        stacked = torch.stack([value.detach().reshape(()).double() for value in tensors.values()])
        numbers.update(zip(tensors, stacked.tolist(), strict=True))
    return {name: float(value) for name, value in numbers.items()}
