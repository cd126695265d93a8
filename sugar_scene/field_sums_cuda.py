# SPDX-License-Identifier: Apache-2.0
"""Backward kernels of the fields for GPUs; on the CPU they run as fibers, for tests.

Sixteen lanes, half of a warp, share a run of samples of one Gaussian i. Each takes a neighbour j
and walks over the run, so that all of them read the same sample at once, and no sum over samples
crosses lanes. What depends on no neighbour is summed by lanes that take every sixteenth sample.
Gradients of row i are linear in those sums, so each lane makes its part of them, and the parts
are added in a fixed tree. Rows of gradients leave through shared memory, neighbouring lanes writing
neighbouring numbers.

Then the rows of a Gaussian are added up one after the other, one lane for each column. Nothing is
added atomically, and no bit depends on how runs are cut into launches.
"""
# Kernels are Warp's language, not Python's.
# pyright: reportInvalidTypeForm=false, reportOperatorIssue=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportReturnType=false
# pyright: reportIndexIssue=false, reportAssignmentType=false

from __future__ import annotations

from collections.abc import Sequence

import torch
import warp as wp

from sugar_scene.field_device import (
    NEGLIGIBLE_SQUARE,
    PAIR_SIZE,
    Neighbor,
    compact_scales_of,
    neighbor_of,
    own_rotation_entries,
    quat_of,
    sign_of,
    vec3_of,
    whitened,
)
from sugar_scene.geometry import MIN_SCALE, SAMPLE_SPREAD
from sugar_utils.warp_arrays import Floats, Floats2d, Floats3d, Ints, Ints2d, Longs
from sugar_utils.warp_launch import FUSED_OPTIONS, known_options, launch_blocks
from sugar_utils.warp_math import (
    TEAM_LANES,
    WARP_LANES,
    Columns,
    add_at,
    add_to_column,
    column,
    four_of,
    gauss,
    lanes_where,
    lowest_bit,
    pick,
    read_lane,
    reciprocal_fast,
    rotation_gradient,
    rotation_matrix,
    smallest_axis,
    sum_columns_of_team,
)

RUN_SAMPLES = 128  # most samples of a run: a Gaussian with more has several runs
_WARPS_TOGETHER = 4  # in one block of a GPU, because a multiprocessor holds at most 16 to 32 blocks
_TEAMS = WARP_LANES // TEAM_LANES
_LANES = wp.constant(WARP_LANES)
_TEAM = wp.constant(TEAM_LANES)
_TEAMS_OF_A_WARP = wp.constant(_TEAMS)
_COLUMNS = wp.constant(PAIR_SIZE)
_ALL = wp.constant(-1)  # bits of all lanes
# For 16 and 48 warps on a multiprocessor.
_RUN_OPTIONS = known_options(grid_stride=False, cuda_max_registers=128)
_ROW_OPTIONS = known_options(grid_stride=False, cuda_max_registers=40)

GradientRow = wp.types.vector(length=PAIR_SIZE, dtype=wp.float32)
"""Gradients of mean 3, quaternion 4, scales 3, opacity 1."""

wp.set_module_options({**FUSED_OPTIONS, "block_dim": _WARPS_TOGETHER * WARP_LANES})

_STORE = f"""
#if defined(__CUDA_ARCH__)
__shared__ float rows[WP_TILE_BLOCK_DIM * {PAIR_SIZE}];
float* warp_rows = rows + (threadIdx.x / {WARP_LANES}) * ({WARP_LANES} * {PAIR_SIZE});
#define WAIT() __syncwarp()
#else
static float warp_rows[{WARP_LANES} * {PAIR_SIZE}];
#define WAIT() WP_TILE_SYNC()
#endif
for (int c = 0; c < {PAIR_SIZE}; c++) warp_rows[lane * {PAIR_SIZE} + c] = row[c];
WAIT();
const size_t first = (size_t)run * gradient_rows.shape[1] + k;
const float* from = warp_rows + (lane / {TEAM_LANES}) * ({TEAM_LANES} * {PAIR_SIZE});
float* to = gradient_rows.data + first * {PAIR_SIZE};
for (int at = lane % {TEAM_LANES}; at < n_rows * {PAIR_SIZE}; at += {TEAM_LANES}) to[at] = from[at];
WAIT();
#undef WAIT
"""


@wp.func_native(_STORE)
def store_rows(gradient_rows: Floats3d, run: int, k: int, n_rows: int, row: GradientRow, lane: int):
    """Store rows k to k + n_rows of each team's run, one of each lane; all lanes of a warp call."""


@wp.struct
class Run:
    """Adjacent samples of one Gaussian, from ``begin`` to before ``end``."""

    begin: int
    end: int
    mean: wp.vec3  # of the Gaussian
    spread: wp.mat33  # R diag(1.5 s), which turns a draw into an offset
    normal: wp.vec3
    density_factor: float


@wp.struct
class RunGradient:
    """Gradient that reaches a run's Gaussian, or a lane's part of it."""

    mean: wp.vec3
    moment: wp.mat33  # of R diag(1.5 s)
    normal: wp.vec3


@wp.struct
class PairSums:
    """Sums over a run's samples for one neighbour, with c = dL/d(y^2 / 2)."""

    y: wp.vec3  # c y
    squares: wp.vec3  # c y_a^2
    products: wp.vec3  # c y_1 y_2, c y_2 y_0, c y_0 y_1
    y_noise: wp.mat33  # c y noise^T
    gauss: float  # dL/d density times e^(-y^2 / 2)
    normal: wp.vec3  # gradient of the neighbour's normal, but for its sign
    beta: float  # dL/d beta


@wp.func
def run_of(begin: int, end: int, i: int, quats: Floats2d, scales: Floats2d, compact: Floats2d):
    """Return the run of some samples of Gaussian i."""
    run = Run()
    run.begin = begin
    run.end = end
    run.mean = vec3_of(compact, i)
    rotation = rotation_matrix(quat_of(quats, i))
    own_scales = vec3_of(scales, i)
    run.spread = rotation * wp.diag(own_scales * wp.static(SAMPLE_SPREAD))
    run.normal = column(rotation, smallest_axis(own_scales))
    return run


@wp.func
def sum_of_samples(
    run: Run,
    member: int,
    noise: Floats2d,
    residual: Floats2d,
    field_grads: Floats2d,
    has_point_grads: int,
    point_grads: Floats2d,
) -> RunGradient:
    """Return a lane's part of what depends on no neighbour: gradients of points, plane, normal."""
    gradient = RunGradient()
    plane_moment = wp.vec3()
    for s in range(run.begin + member, run.end, _TEAM):
        draw = vec3_of(noise, s)
        gradients = four_of(field_grads, s, 0)
        error = four_of(residual, s, 0)
        plane_moment += draw * gradients[2]
        gradient.normal += wp.vec3(error[0], error[1], error[2]) * (2.0 * gradients[3])
        if has_point_grads == 1:
            point_grad = vec3_of(point_grads, s)
            gradient.mean += point_grad
            gradient.moment += wp.outer(point_grad, draw)
    # The tangent plane is anchored at the mean, so shifting the mean alone changes nothing.
    gradient.moment += wp.outer(run.normal, plane_moment)
    gradient.normal += run.spread * plane_moment
    return gradient


@wp.func
def sums_of_pair(
    run: Run,
    neighbor: Neighbor,
    noise: Floats2d,
    residual: Floats2d,
    field_grads: Floats2d,
) -> PairSums:
    """Sum over a run's samples for one neighbour; samples too far away for float32 add zeros."""
    sums = PairSums()
    strength = run.density_factor * neighbor.opacity
    for s in range(run.begin, run.end):
        draw = vec3_of(noise, s)
        gradients = four_of(field_grads, s, 0)
        error = four_of(residual, s, 0)
        y = whitened(neighbor, run.mean + run.spread * draw)
        square = wp.dot(y, y)
        opacity = float(0.0)
        if square < wp.static(NEGLIGIBLE_SQUARE):
            opacity = gauss(square)
        else:
            # An infinite distance times zero would not be zero.
            y = wp.vec3()
        pulled = gradients[0] * opacity
        sums.gauss += pulled
        sums.beta += gradients[1]
        cy = y * (-strength * pulled)
        sums.y += cy
        sums.squares += wp.cw_mul(cy, y)
        sums.products += wp.vec3(cy[1] * y[2], cy[2] * y[0], cy[0] * y[1])
        sums.y_noise += wp.outer(cy, draw)
        along = wp.abs(pick(y, neighbor.axis))
        weight = strength * opacity * along * neighbor.normal_factor * error[3]
        sums.normal += wp.vec3(error[0], error[1], error[2]) * (-2.0 * gradients[3] * weight)
    return sums


@wp.func
def scale_gradient(scales: wp.vec3, yy_moment: wp.mat33) -> wp.vec3:
    """Return the scales' gradient from the moment <c y y^T>, since dy_a / ds_a = -y_a / s_a."""
    grad = wp.vec3()
    for a in range(3):
        if scales[a] >= wp.static(MIN_SCALE):
            grad[a] = -yy_moment[a, a] * reciprocal_fast(scales[a])
    return grad


@wp.func
def rotation_entries(rotation: wp.mat33, scales: wp.vec3, yy_moment: wp.mat33) -> wp.mat33:
    """Gradient of the rotation's entries: y_a = R_a . d / s_a with d = sum_b R_b s_b y_b."""
    clamped = wp.max(scales, wp.vec3(wp.static(MIN_SCALE)))
    grad = wp.mat33()
    for a in range(3):
        entries = rotation * wp.cw_mul(clamped, column(yy_moment, a)) * reciprocal_fast(clamped[a])
        for r in range(3):
            grad[r, a] = entries[r]
    return grad


@wp.func
def gradient_of_neighbor(
    sums: PairSums,
    run: Run,
    neighbor: Neighbor,
    quat: wp.vec4,
    scales: wp.vec3,
    beta_share: float,
) -> GradientRow:
    """Return the gradient of a neighbour's row."""
    rotation = rotation_matrix(quat)
    yy_moment = wp.mat33(
        sums.squares[0],
        sums.products[2],
        sums.products[1],
        sums.products[2],
        sums.squares[1],
        sums.products[0],
        sums.products[1],
        sums.products[0],
        sums.squares[2],
    )
    sign = sign_of(wp.dot(column(rotation, neighbor.axis), run.normal))
    entries = rotation_entries(rotation, scales, yy_moment)
    entries = add_to_column(entries, neighbor.axis, sums.normal * sign)
    quat_grad = rotation_gradient(quat, entries)
    scale_grad = add_at(scale_gradient(scales, yy_moment), neighbor.axis, beta_share)
    unwhitening = wp.matrix_from_cols(neighbor.first, neighbor.second, neighbor.third)
    mean_grad = unwhitening * sums.y
    row = GradientRow()
    for c in range(3):
        row[c] = -mean_grad[c]
        row[7 + c] = scale_grad[c]
    for c in range(4):
        row[3 + c] = quat_grad[c]
    row[10] = run.density_factor * sums.gauss
    return row


@wp.func
def gradient_of_owner(gradient: RunGradient, quat: wp.vec4, scales: wp.vec3) -> Columns:
    """Return a lane's part of the gradient of a run's Gaussian, the first columns of 16."""
    rotation = rotation_matrix(quat)
    spread_scales = scales * wp.static(SAMPLE_SPREAD)
    entries = own_rotation_entries(
        gradient.moment, spread_scales, smallest_axis(scales), gradient.normal
    )
    quat_grad = rotation_gradient(quat, entries)
    columns = Columns()
    for c in range(3):
        along = wp.dot(column(rotation, c), column(gradient.moment, c))
        columns[c] = gradient.mean[c]
        columns[7 + c] = along * wp.static(SAMPLE_SPREAD)
    for c in range(4):
        columns[3 + c] = quat_grad[c]
    return columns


@wp.kernel(**_RUN_OPTIONS)
def add_up_runs(
    owners: Ints,
    starts: Ints,
    quats: Floats2d,
    scales: Floats2d,
    compact: Floats2d,
    neighbors: Ints2d,
    noise: Floats2d,
    residual: Floats2d,
    density_factor: float,
    has_point_grads: int,
    point_grads: Floats2d,
    field_grads: Floats2d,
    gradient_rows: Floats3d,
    n_filled: Ints,
):
    """Backpropagate runs, two in each warp; field_grads: density, beta, plane, normal.

    Runs without samples are the last ones. Their gradient rows are not written; ``n_filled`` gets
    the number of the other runs.
    """
    warp, lane = wp.tid()
    n_runs = owners.shape[0]
    first_run = warp * _TEAMS_OF_A_WARP
    if starts[first_run] == starts[first_run + 1]:
        if first_run == 0 and lane == 0:
            n_filled[0] = 0
        return
    r = first_run + lane / _TEAM
    member = lane % _TEAM
    i = int(0)
    begin = int(0)
    end = int(0)
    if r < n_runs:
        i = owners[r]
        begin = starts[r]
        end = starts[r + 1]
    has_samples = end > begin
    if has_samples and member == 0:
        is_last = r + 1 == n_runs
        if not is_last:
            is_last = starts[wp.min(r + 2, n_runs)] == end
        if is_last:
            n_filled[0] = r + 1
    run = run_of(begin, end, i, quats, scales, compact)
    run.density_factor = density_factor
    gradient = sum_of_samples(
        run, member, noise, residual, field_grads, has_point_grads, point_grads
    )
    n_neighbors = neighbors.shape[1]
    for first in range(0, n_neighbors, _TEAM):
        row = GradientRow()
        if has_samples and first + member < n_neighbors:
            j = neighbors[i, first + member]
            neighbor = neighbor_of(compact, j)
            sums = sums_of_pair(run, neighbor, noise, residual, field_grads)
            unwhitening = wp.matrix_from_cols(neighbor.first, neighbor.second, neighbor.third)
            gradient.mean += unwhitening * sums.y
            gradient.moment += unwhitening * sums.y_noise
            quat = four_of(compact, j, 4)
            neighbor_scales = compact_scales_of(compact, j)
            beta_share = sums.beta / float(n_neighbors)
            row = gradient_of_neighbor(sums, run, neighbor, quat, neighbor_scales, beta_share)
        n_rows = int(0)
        if has_samples:
            n_rows = wp.min(_TEAM, n_neighbors - first)
        store_rows(gradient_rows, r, first, n_rows, row, lane)
    # Read again, because registers are short in the loop.
    part = gradient_of_owner(gradient, quat_of(quats, i), vec3_of(scales, i))
    total = sum_columns_of_team(part, lane)
    if has_samples and member < _COLUMNS:
        gradient_rows[r, n_neighbors, member] = total


@wp.func
def bits_above(bits: int, place: int) -> int:
    """Return the bits of higher places than ``place``."""
    return bits & (_ALL << place) & ~(1 << place)


@wp.func
def end_of_target(
    first_entry: int,
    target: int,
    targets: Ints,
    order: Longs,
    n_pairs: int,
    lane: int,
) -> int:
    """Return the first entry from ``first_entry`` on that is not a filled row of a target."""
    n_entries = targets.shape[0]
    end = first_entry
    searching = int(1)
    while searching == 1:
        entry = wp.min(end + lane, n_entries - 1)
        belongs = targets[entry] == target and int(order[entry]) < n_pairs
        differs = int(1)
        if end + lane < n_entries and belongs:
            differs = 0
        others = lanes_where(differs, lane)
        if others == 0:
            end += _LANES
        else:
            end += lowest_bit(others)
            searching = 0
    return end


@wp.func
def gradient_column(
    mean_grads: Floats2d,
    quat_grads: Floats2d,
    scale_grads: Floats2d,
    opacity_grads: Floats,
    row: int,
    c: int,
) -> float:
    """Read one number of a Gaussian's gradient."""
    if c < 3:
        return mean_grads[row, c]
    if c < 7:
        return quat_grads[row, c - 3]
    if c < 10:
        return scale_grads[row, c - 7]
    return opacity_grads[row]


@wp.kernel(**_ROW_OPTIONS)
def add_up_rows(
    targets: Ints,
    order: Longs,
    n_filled: Ints,
    per_run: int,
    gradient_rows: Floats2d,
    mean_grads: Floats2d,
    quat_grads: Floats2d,
    scale_grads: Floats2d,
    opacity_grads: Floats,
):
    """Add gradient rows of equal targets, which are adjacent, to the gradients of the target.

    A warp takes the targets that begin in its 32 entries, two at a time, a lane for each column.
    Rows of runs without samples, the last ones of a target, are not read.
    """
    warp, lane = wp.tid()
    n_entries = targets.shape[0]
    n_pairs = n_filled[0] * per_run
    first_entry = warp * _LANES
    entry = first_entry + lane
    target = int(-1)
    begins = int(0)
    stops = int(1)
    if entry < n_entries:
        target = targets[entry]
        is_filled = int(order[entry]) < n_pairs
        is_first = entry == 0
        if not is_first:
            is_first = targets[wp.max(entry - 1, 0)] != target
        if is_filled and is_first:
            begins = 1
        if is_filled and not is_first:
            stops = 0
    waiting = lanes_where(begins, lane)
    stopping = lanes_where(stops, lane)
    team = lane / _TEAM
    c = lane % _TEAM
    while waiting != 0:
        j = lowest_bit(waiting)
        waiting = waiting & (waiting - 1)
        last_j = j
        is_working = team == 0
        if waiting != 0:
            last_j = lowest_bit(waiting)
            waiting = waiting & (waiting - 1)
            is_working = True
            if team == 1:
                j = last_j
        row = read_lane(target, lane, j)
        end = first_entry + _LANES
        if bits_above(stopping, last_j) == 0:
            last_row = read_lane(target, lane, last_j)
            end = end_of_target(end, last_row, targets, order, n_pairs, lane)
        later = bits_above(stopping, j)
        if later != 0:
            end = first_entry + lowest_bit(later)
        if is_working and c < _COLUMNS:
            total = gradient_column(mean_grads, quat_grads, scale_grads, opacity_grads, row, c)
            for at in range(first_entry + j, end):
                total += gradient_rows[int(order[at]), c]
            if c < 3:
                mean_grads[row, c] = total
            elif c < 7:
                quat_grads[row, c - 3] = total
            elif c < 10:
                scale_grads[row, c - 7] = total
            else:
                opacity_grads[row] = total


def launch_runs(n_runs: int, inputs: Sequence[object], device: torch.device) -> None:
    """Launch :func:`add_up_runs`, half a warp for each run."""
    _launch_warps(add_up_runs, -(-n_runs // _TEAMS), inputs, device)


def launch_rows(n_entries: int, inputs: Sequence[object], device: torch.device) -> None:
    """Launch :func:`add_up_rows`, a warp for 32 entries."""
    _launch_warps(add_up_rows, -(-n_entries // WARP_LANES), inputs, device)


def _launch_warps(
    kernel: wp.Kernel, n_warps: int, inputs: Sequence[object], device: torch.device
) -> None:
    launch_blocks(
        kernel,
        n_warps,
        inputs,
        device=device,
        block_dim=WARP_LANES,
        together=_WARPS_TOGETHER,
    )
