# SPDX-License-Identifier: Apache-2.0
"""Adam's step as a part of recorded launches, which read its rates and counts on the device."""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor

from gaussian_splatting.optim.adam import BASE, Gradients, GroupedAdam
from gaussian_splatting.optim.adam_state import BANDS
from sugar_utils.device import upload_into


class RecordedStep:
    """The step of a recording: its numbers on the device, and what a repetition has made.

    A recorded pass owns one. It calls :meth:`record` while launches are recorded; before each
    repetition :meth:`send_numbers`, and after it :meth:`mark_made`.
    """

    def __init__(self, adam: GroupedAdam) -> None:
        self._adam = adam
        self._inputs = adam.next_inputs()  # a row of numbers for each parameter

    @torch.no_grad()
    def record(self, step_mask: Tensor) -> bool:
        """Make the launches of the next step while launches are recorded; gradients stay.

        Args:
            step_mask: Read on the device in each repetition; false: nothing is changed. (1,) bool

        Returns:
            Whether that can be done: only after a step launched one by one, which makes the
            moments.
        """
        adam = self._adam
        names = adam.stepping()
        if not adam.has_moments(names):
            return False
        gradients = adam.take_gradients()
        adam.put_gradients(_with_copies(gradients))
        adam.update(names, self._inputs._replace(step_mask=step_mask))
        adam.put_gradients(gradients)
        return True

    def send_numbers(self) -> None:
        """Send rates and counts of the next step to where the recorded one reads them."""
        upload_into(self._inputs.numbers, self._adam.next_numbers())

    def mark_made(self) -> None:
        """Note that a repetition has made the next step, which has to be counted only."""
        self._adam.is_made = True


def step_facts(adam: GroupedAdam) -> Hashable:
    """Return what a recorded step depends on besides the parameters."""
    return tuple(adam.moment_facts())


def _with_copies(gradients: Gradients) -> Gradients:
    """The same gradients, with copies of those to which factors are added in place."""
    if not gradients.of_colors:
        return gradients
    dense = dict(gradients.dense)
    for name in dense.keys() & {BASE, BANDS}:
        dense[name] = dense[name].clone()
    return gradients._replace(dense=dense)
