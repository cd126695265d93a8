# SPDX-License-Identifier: Apache-2.0
"""Inputs of kernels: buffers that they can number, and the arguments of this launch."""

from __future__ import annotations

import ctypes
import weakref
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
import warp as wp

from sugar_utils import warp_launch
from sugar_utils.errors import UserError
from sugar_utils.warp_launch import MAX_ROWS, PreparedLaunch, as_array, describe, launch


@pytest.mark.parametrize("shape", [(2**31,), (2**31, 13), (3, 2**32)])
def test_buffers_that_kernels_cannot_number_are_refused(shape):
    with pytest.raises(UserError, match=r"more rows than kernels can number \(2\^31\)"):
        describe(torch.empty(shape, device="meta"))


def test_many_values_in_countable_rows_are_not():
    # Without memory behind it: nothing reads the buffer.
    description = describe(torch.empty(1, dtype=torch.uint8).expand(MAX_ROWS // 8, 32))
    assert description.shape[0] == MAX_ROWS // 8


@wp.struct
class Line:
    """A slope and an offset."""

    slope: float
    offset: wp.vec3


@wp.kernel(enable_backward=False)
def move_points(
    first: int,
    line: Line,
    times: int,
    shift: wp.vec3,
    points: wp.array(dtype=wp.vec3),
    moved: wp.array2d(dtype=float),
):
    i = first + wp.tid()
    point = float(times) * line.slope * points[i] + line.offset + shift
    for c in range(3):
        moved[i, c] = point[c]


def line_of(slope: float, offset: float) -> Line:
    line = Line()
    line.slope, line.offset = slope, wp.vec3(offset, 0.0, -offset)
    return line


def launched(points: torch.Tensor, slope=2.0, offset=0.5, times=3, shift=0.25) -> torch.Tensor:
    moved = torch.full((points.shape[0], 3), torch.nan)
    inputs = [line_of(slope, offset), times, wp.vec3(shift), as_array(points, wp.vec3), moved]
    launch(move_points, points.shape[0], inputs, device=points.device)
    return moved


def expected(points: torch.Tensor, slope=2.0, offset=0.5, times=3, shift=0.25) -> torch.Tensor:
    return times * slope * points + torch.tensor([offset, 0.0, -offset]) + shift


CHANGES = {
    "nothing": {},
    "struct": {"slope": -1.0, "offset": 4.0},
    "number": {"times": -7},
    "vector": {"shift": 3.0},
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("rows", [5, 1, 300])
def test_a_launch_that_is_repeated_takes_its_new_arguments(change, rows):
    points = torch.rand(40, 3)
    torch.testing.assert_close(launched(points), expected(points))
    points = torch.rand(rows, 3)
    found = launched(points, **CHANGES[change])
    torch.testing.assert_close(found, expected(points, **CHANGES[change]))


def test_tensors_of_another_layout_are_described_anew():
    points = torch.rand(6, 6)
    for given in (points[:, :3].contiguous(), points[:, 3:], points[::2, :3], points[:, :3]):
        torch.testing.assert_close(launched(given), expected(given))
    described = torch.rand(4, 3, requires_grad=True)
    torch.testing.assert_close(launched(described), expected(described.detach()))


@wp.kernel(enable_backward=False)
def add_columns(first: int, table: wp.array2d(dtype=float), sums: wp.array(dtype=float)):
    i = first + wp.tid()
    total = float(0.0)
    for c in range(table.shape[1]):
        total += table[i, c]
    sums[i] = total


def test_tables_of_other_widths_and_strides_in_turn():
    wide = torch.rand(50, 9)
    for table in (wide, wide[:7, 2:5], wide.T, torch.rand(3, 1), wide[::2], torch.rand(0, 4)):
        sums = torch.full((len(table),), torch.nan)
        launch(add_columns, len(table), [table, sums], device=table.device)
        torch.testing.assert_close(sums, table.sum(dim=1))


def test_a_launch_on_a_stream_is_recorded_once(monkeypatch):
    """The path of GPUs, with Warp's device of the CPU, which like all of them has no hash."""
    stream = SimpleNamespace(device=wp.get_device("cpu"))
    monkeypatch.setattr(warp_launch, "torch_stream", lambda device: stream)
    monkeypatch.setattr(warp_launch, "block_dim_of", lambda kernel, n_items: 1)
    points = torch.rand(40, 3)
    for slope in (2.0, -1.0):
        moved = torch.full((40, 3), torch.nan)
        inputs = [line_of(slope, 0.5), 3, wp.vec3(0.25), as_array(points, wp.vec3), moved]
        launch(move_points, 40, inputs, device=torch.device("cuda"))
        torch.testing.assert_close(moved, expected(points, slope=slope))


def test_a_struct_that_was_an_argument_stays_as_it_was():
    kept = line_of(2.0, 0.5)
    points, moved = torch.rand(2, 3), torch.empty(2, 3)
    inputs = [wp.vec3(0.0), as_array(points, wp.vec3), moved]
    launch(move_points, 2, [kept, 1, *inputs], device=points.device)
    launch(move_points, 2, [line_of(9.0, 9.0), 1, *inputs], device=points.device)
    assert (kept.slope, kept.offset[0]) == (2.0, 0.5)


def test_threads_that_launch_the_same_kernel_do_not_mix_their_arguments():
    points = [torch.rand(2000, 3) for _ in range(8)]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(10):
            found = pool.map(lambda i: launched(points[i], slope=float(i)), range(8))
            for i, moved in enumerate(found):
                torch.testing.assert_close(moved, expected(points[i], slope=float(i)))


def test_a_launch_keeps_no_tensor_alive():
    points = torch.rand(1000, 3)
    launched(points)
    kept = weakref.ref(points)
    del points
    assert kept() is None


def test_a_prepared_launch_keeps_none_of_its_first_tensors_alive():
    points, moved = torch.rand(1000, 3), torch.empty(1000, 3)
    inputs = [0, line_of(1.0, 0.0), 1, wp.vec3(0.0), as_array(points, wp.vec3), moved]
    prepared = PreparedLaunch(move_points, 1000, inputs, device="cpu")
    prepared.run_range(0, 1000)
    kept = [weakref.ref(tensor) for tensor in (points, moved)]
    del points, moved, inputs
    assert [tensor() for tensor in kept] == [None, None]


@pytest.mark.parametrize("first", ["one row", "no rows"])
def test_strides_of_a_slice_of_few_rows_are_not_those_of_whole_tensors(first):
    """Slices of one row and of none count as contiguous, whatever their strides."""
    n = 1 if first == "one row" else 0
    wide = torch.rand(4, 9)

    def inputs(points, moved):
        return [0, line_of(1.0, 0.0), 1, wp.vec3(0.0), as_array(points, wp.vec3), moved]

    little = inputs(wide[:n, :3], torch.empty(4, 7)[:n, :3])
    prepared = PreparedLaunch(move_points, 1, little, device="cpu")
    # With memory behind them, so that wrong strides are no crash.
    points, moved = torch.rand(50, 3)[:5], torch.full((50, 3), torch.nan)[:5]
    prepared.take(inputs(points, moved))
    prepared.run_range(0, 5)
    torch.testing.assert_close(moved, points)
    # And the other way around.
    moved = torch.full((1, 3), torch.nan)
    prepared.take(inputs(wide[2:3, :3], moved))
    prepared.run_range(0, 1)
    torch.testing.assert_close(moved, wide[2:3, :3])


def test_a_launch_that_begins_while_another_is_resized_has_its_own_size(monkeypatch):
    points, moved = torch.rand(8, 3), torch.full((8, 3), torch.nan)
    inputs = [0, line_of(1.0, 0.0), 1, wp.vec3(0.0), as_array(points, wp.vec3), moved]
    prepared = PreparedLaunch(move_points, 2, inputs, device="cpu")
    resize, waiting = wp.Launch.set_dim, [2]

    def interrupted(launch, dim):
        resize(launch, dim)
        if waiting:
            # What another thread may do now.
            prepared.run_range(0, waiting.pop())
            assert moved[:2].isfinite().all()
            assert moved[2:].isnan().all()

    monkeypatch.setattr(wp.Launch, "set_dim", interrupted)
    prepared.run_range(4, 1)
    assert not waiting


def test_more_rows_than_at_first_are_counted_as_well():
    launched(torch.rand(4, 3))
    many = torch.empty(1, dtype=torch.float32).expand(2**31, 3)
    with pytest.raises(UserError, match=r"more rows than kernels can number"):
        launch(
            move_points,
            1,
            [line_of(1.0, 0.0), 1, wp.vec3(0.0), as_array(many, wp.vec3), torch.empty(1, 3)],
            device=torch.device("cpu"),
        )


def test_the_addresses_that_a_driver_is_given_are_those_of_the_arguments_now(monkeypatch):
    """A launch as recorded for a GPU: a table of addresses."""
    record, recorded = wp.launch, []

    def record_for_gpu(*arguments, **how):
        found = record(*arguments, **how)
        addresses = [ctypes.addressof(parameter) for parameter in found.params]
        found.params_addr = (ctypes.c_void_p * len(addresses))(*addresses)
        recorded.append(found)
        return found

    monkeypatch.setattr(wp, "launch", record_for_gpu)
    first, later = torch.rand(4, 3), torch.rand(9, 3)

    def arguments(points, slope, times):
        return [0, line_of(slope, 0.0), times, wp.vec3(slope), as_array(points, wp.vec3), points]

    prepared = PreparedLaunch(move_points, 4, arguments(first, 1.0, 2), device="cpu")
    prepared.take(arguments(later, 5.0, 6))
    prepared.run(9, None, 1)
    (launch_of_all,) = recorded
    table, parameters = launch_of_all.params_addr, launch_of_all.params
    assert list(table) == [ctypes.addressof(parameter) for parameter in parameters]

    def at(index, kind):
        return ctypes.cast(table[index], ctypes.POINTER(kind))[0]

    assert (at(0, type(parameters[0])).size, at(1, ctypes.c_int), at(3, ctypes.c_int)) == (9, 0, 6)
    assert at(2, ctypes.c_float) == at(4, ctypes.c_float) == 5.0
    for index in (5, 6):
        described = at(index, type(parameters[index]))
        assert (described.data, described.shape[0]) == (later.data_ptr(), 9)
