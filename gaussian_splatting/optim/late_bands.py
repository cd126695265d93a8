# SPDX-License-Identifier: Apache-2.0
"""Steps of colour bands that wait until their Gaussian is in view.

Adam steps every row in every iteration, also those that the view does not show: their moments fade
and move them on. Where the rows lie on the host, that would send all of them over the bus and back.
So rows out of view are left as they are, and the numbers of the steps are kept. Before a view reads
a row, the steps that it lacks are made up for, one after the other, without a gradient: the row has
the bits that it would have had.

How many steps wait is a number on the device, so that recorded launches find it when they are
repeated. The host counts along, so that there is memory for the numbers of the next step.

A thread has one number of a row, so that neighbouring threads read and write neighbouring numbers:
over the bus each access of a few bytes is a packet of its own.
"""
# Kernels are Warp's language, not Python's.
# pyright: reportInvalidTypeForm=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
# pyright: reportIndexIssue=false, reportCallIssue=false, reportArgumentType=false

from __future__ import annotations

import torch
import warp as wp
from torch import Tensor

from gaussian_splatting.core.color_gradients import ColorGradient
from gaussian_splatting.optim.adam_steps import MOMENTS, ParameterState, by_formats
from gaussian_splatting.optim.band_steps import (
    BAND_ARRAYS,
    CHANNELS,
    BandSettings,
    Table,
    band_arguments,
    band_settings,
    color_weight,
    put_number,
    step_number,
    stepped_number,
    stored_number,
)
from gaussian_splatting.rasterization.projection_kernels import view_at
from sugar_utils.warp_arrays import Bools, Floats, Ints, Ints2d, Vec3s
from sugar_utils.warp_launch import as_array, launch
from sugar_utils.warp_math import pick

wp.set_module_options({"enable_backward": False, "cpu_compiler_flags": "-march=native"})

MAX_WAITING = 512
"""Steps that may wait; then all rows are brought up to date, which costs as much as one step of
all rows and little more."""


@wp.kernel
def catch_up_rows(
    first: int,
    s: BandSettings,
    is_chosen: Bools,
    n_waiting: Ints,
    waiting: Ints2d,
    n_made: Ints,
    values: Table,
    exp_avg: Table,
    exp_avg_sq: Table,
):
    """Make the steps that one number of a chosen Gaussian lacks, in registers."""
    item = first + wp.tid()
    i = item // values.shape[1]
    column = item - i * values.shape[1]
    if not is_chosen[i] or n_made[i] >= n_waiting[0]:
        return
    n = stored_number(i, column, values, exp_avg, exp_avg_sq)
    for step in range(n_made[i], n_waiting[0]):
        numbers_of_step = wp.vec3i(waiting[step, 0], waiting[step, 1], waiting[step, 2])
        n = stepped_number(n, 0.0, s, numbers_of_step, item, values, exp_avg)
    put_number(n, i, column, values, exp_avg, exp_avg_sq)


@wp.kernel
def step_in_view(
    first: int,
    s: BandSettings,
    step: Ints,
    step_mask: Bools,
    is_in_view: Bools,
    n_waiting: Ints,
    waiting: Ints2d,
    n_made: Ints,
    record: Floats,
    means: Vec3s,
    d_colors: Vec3s,
    values: Table,
    exp_avg: Table,
    exp_avg_sq: Table,
):
    """Step one number of a Gaussian in view, which lacks no step; the first thread notes the step.

    What other threads read is left as it is: the caller counts the step.
    """
    if not step_mask[0]:
        return
    item = first + wp.tid()
    numbers = wp.vec3i(step[0], step[1], step[2])
    if item == 0:
        for k in range(3):
            waiting[n_waiting[0], k] = numbers[k]
    i = item // values.shape[1]
    if not is_in_view[i]:
        return
    column = item - i * values.shape[1]
    if column == 0:
        n_made[i] = n_waiting[0] + 1
    k = column // CHANNELS
    d_color = d_colors[i]
    weight = color_weight(k, means[i], view_at(record).center, s.degree, d_color)
    g = weight * pick(d_color, column - CHANNELS * k)
    step_number(i, column, g, s, numbers, values, exp_avg, exp_avg_sq)


_CATCH_UP_ROWS = by_formats(catch_up_rows, BAND_ARRAYS)
_STEP_IN_VIEW = by_formats(step_in_view, BAND_ARRAYS)


class LateBands:
    """The steps that rows of one parameter lack.

    Args:
        value: The coefficients, (N, K, 3); they change in place.
        moments: Both moments of it.
    """

    def __init__(self, value: Tensor, moments: dict[str, Tensor]) -> None:
        self._value = value.detach()
        self._moments = moments
        device = value.device
        # Numbers of the waiting steps, see ``adam_steps.step_numbers``.
        self._waiting = torch.zeros(MAX_WAITING, 3, dtype=torch.int32, device=device)
        self._n_waiting = torch.zeros(1, dtype=torch.int32, device=device)
        self._most_waiting = 0  # as the host knows it; a step with bad numbers does not wait
        # Of the waiting steps, how many each row has made. (N,)
        self._n_made = torch.zeros(len(value), dtype=torch.int32, device=device)
        # Rows that were in view since the last step; all before the first one, whose view may have
        # been projected earlier. (N,)
        self._is_in_view = torch.ones(len(value), dtype=torch.bool, device=device)

    def catch_up_in_view(self, radii: Tensor) -> None:
        """Make the steps that Gaussians in view lack. radii: 0 for others, (N,) int32"""
        is_in_view = radii > 0
        self._is_in_view |= is_in_view
        self._make_steps(is_in_view)
        torch.where(is_in_view, self._n_waiting, self._n_made, out=self._n_made)

    def catch_up(self) -> None:
        """Make all steps that rows lack; not while launches are recorded."""
        if self._most_waiting == 0:
            return
        self._make_steps(torch.ones_like(self._is_in_view))
        self._n_made.zero_()
        self._n_waiting.zero_()
        self._most_waiting = 0

    def _make_steps(self, is_chosen: Tensor) -> None:
        """Make the steps that some rows lack. (N,) bool"""
        arguments = [
            band_settings(degree=0),
            is_chosen,
            self._n_waiting,
            self._waiting,
            self._n_made,
            *band_arguments(self._value, self._moments),
        ]
        kernel = _CATCH_UP_ROWS[self._formats]
        launch(kernel, self._value.numel(), arguments)

    def step(self, state: ParameterState, gradient: ColorGradient) -> None:
        """Step the rows that were in view since the last step; the others lack this one, too.

        All rows that have a gradient were. The host calls :meth:`count_step` for it.
        """
        inputs = state.inputs()
        arguments = [
            band_settings(gradient.sh_degree),
            *inputs,
            self._is_in_view,
            self._n_waiting,
            self._waiting,
            self._n_made,
            gradient.camera_record,
            as_array(gradient.means, wp.vec3),
            as_array(gradient.colors, wp.vec3),
            *band_arguments(self._value, self._moments),
        ]
        kernel = _STEP_IN_VIEW[self._formats]
        launch(kernel, self._value.numel(), arguments)
        self._n_waiting += inputs.step_mask
        self._is_in_view.masked_fill_(inputs.step_mask, False)

    def count_step(self) -> None:
        """Note that one more step waits, or was repeated; all are made where no more may wait."""
        self._most_waiting += 1
        if self._most_waiting == MAX_WAITING:
            self.catch_up()

    @property
    def _formats(self) -> tuple[torch.dtype, torch.dtype]:
        return self._value.dtype, self._moments[MOMENTS[0]].dtype
