# SPDX-License-Identifier: Apache-2.0
"""Pack charts into a square.

Each chart is turned so that the box around it is smallest. Large ones are dropped onto those that
are there already, as in Lévy et al., "Least squares conformal maps", 2002, in four orientations;
small ones are put into gaps, by the boxes around them. The scale is searched for that fills the
square. All of it happens on a grid of cells, which are texels, or several in large textures.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from sugar_extractors.texture.chart_cutting import compact
from sugar_extractors.texture.charts import Charts
from sugar_extractors.texture.plane_geometry import cells_inside, doubled_areas
from sugar_utils.errors import UserError

_MOST_CELLS = 2048  # along a side of the grid
_GAP_CELLS = 512  # along a side of the grid on which gaps are looked for
_SMALL = 24  # charts whose box is smaller than a square of this share of the side go into gaps
_TURNS = np.radians(np.arange(0, 90, 5))
_FIRST_SHARE = 0.8  # of the square that charts are tried to cover at first
_TRIALS = 4  # scales that are tried where one fits
_MOST_TRIALS = 60  # where none does
_CLOSE = 1.01  # ratio of scales that are not told apart any more
_SPARE_ROWS = 128
_WEIGHTS = 0.5, 1.0, 2.0, 5.0  # of the room above a chart, beside that below, where it is dropped
_WAYS_KEPT = 2  # strategies of dropping charts that are tried at all scales
_HIGHEST = 4  # sides that charts are said to be high together where there is no room
_BORDER = 1  # cells around a chart that are its own
_TINY = 1e-300


class _Flat(NamedTuple):
    """Charts that are to be packed, each from (0, 0) on."""

    corners: np.ndarray  # of the faces, (F, 3, 2), in units of the surface
    charts: np.ndarray  # of the faces, (F,)
    sizes: np.ndarray  # width and height of the charts, (C, 2)
    area: float  # of all faces


class _Position(NamedTuple):
    """Where a chart lies on the grid."""

    x: int
    y: int
    quarter_turns: int = 0


class _Dropped(NamedTuple):
    """Large charts that lie on each other."""

    positions: dict[int, _Position]
    height: int  # rows that they take


class _Strategy(NamedTuple):
    """A strategy of dropping charts, the largest first."""

    size: Callable[[np.ndarray], float]  # of the mask of a chart, by which charts are sorted
    weight: float  # of the room above a chart, beside that below


def _longest_side(mask: np.ndarray) -> float:
    return max(mask.shape)


def _n_cells(mask: np.ndarray) -> float:
    return int(mask.sum())


def _strategies() -> list[_Strategy]:
    strategies = []
    for size in (_longest_side, _n_cells):
        strategies += [_Strategy(size, weight) for weight in _WEIGHTS]
    return strategies


class _Packing(NamedTuple):
    """Charts that fit on the grid."""

    scale: float  # cells per unit of the surface
    masks: list[np.ndarray]  # cells of each chart, (h, w) bool
    positions: list[_Position]


def packed(charts: Charts, side: int) -> np.ndarray:
    """Return corners of the faces in a texture of so many texels a side. (F, 3, 2) float64

    Raises:
        UserError: The charts do not fit, however small.
    """
    flat = _turned(compact(charts))
    texels = -(-side // _MOST_CELLS)
    cells = side // texels
    best = None
    too_large = math.inf
    scale = cells * math.sqrt(_FIRST_SHARE / max(flat.area, _TINY))
    strategies = _strategies()
    for trial in range(_MOST_TRIALS):
        masks = _masks(flat, scale)
        dropped = [_dropped(masks, cells, strategy) for strategy in strategies]
        # What is best at one scale is good at others.
        order = sorted(range(len(strategies)), key=lambda k: dropped[k].height)
        order = order[:_WAYS_KEPT]
        strategies = [strategies[k] for k in order]
        positions, height = _filled(masks, dropped[order[0]], cells)
        if height <= cells:
            best = _Packing(scale, masks, positions)
        else:
            too_large = scale
        if best is not None and (trial >= _TRIALS or too_large < _CLOSE * best.scale):
            return texels * _moved(flat, best)
        step = math.sqrt(cells / height)
        if best is None:
            scale *= min(0.98, 0.99 * step)
        elif too_large == math.inf:
            scale *= max(1.01, 1.005 * step)
        else:
            scale = math.sqrt(best.scale * too_large)
    raise UserError(
        f"{len(flat.sizes):,} charts do not fit into a texture of {side} texels a side; raise "
        "--square_size or --texture_size, or use --texture_atlas squares"
    )


def _turned(charts: Charts) -> _Flat:
    """Turn each chart so that the box around it is smallest."""
    n_charts = int(charts.numbers.max(initial=-1)) + 1
    owners = np.repeat(charts.numbers, 3)
    order = np.argsort(owners, kind="stable")
    points = charts.corners.reshape(-1, 2)[order]
    owners = owners[order]
    first = np.searchsorted(owners, np.arange(n_charts))
    smallest = np.full(n_charts, np.inf)
    turns = np.zeros(n_charts)
    for angle in _TURNS:
        turned = points @ _rotation(angle).T
        highest = np.maximum.reduceat(turned, first)
        lowest = np.minimum.reduceat(turned, first)
        sides = highest - lowest
        # A line has a box without area in one position, which is not better for that.
        boxes = sides.prod(axis=1) + 1e-6 * sides.max(axis=1) ** 2
        is_better = boxes < smallest
        smallest[is_better] = boxes[is_better]
        turns[is_better] = angle
    rotations = np.stack([_rotation(angle) for angle in turns])
    corners = np.einsum("fij,fkj->fki", rotations[charts.numbers], charts.corners)
    turned = corners.reshape(-1, 2)[order]
    low = np.minimum.reduceat(turned, first)
    corners -= low[charts.numbers][:, None]
    sizes = np.maximum.reduceat(turned, first) - low
    area = float(np.abs(doubled_areas(corners)).sum()) / 2
    return _Flat(corners, charts.numbers, sizes, area)


def _rotation(angle: float) -> np.ndarray:
    """Return the rotation of the plane by an angle in radians. (2, 2)"""
    cosine = math.cos(angle)
    sine = math.sin(angle)
    return np.array([[cosine, -sine], [sine, cosine]])


def _masks(flat: _Flat, scale: float) -> list[np.ndarray]:
    """Return the cells that belong to each chart at a scale, with its border. (h, w) bool each"""
    corners = flat.corners * scale + _BORDER
    shapes = np.floor(flat.sizes * scale).astype(np.int64) + 1 + 2 * _BORDER
    starts = np.concatenate([[0], np.cumsum(shapes.prod(axis=1))])
    cells = np.zeros(starts[-1], dtype=bool)

    def mark(x: np.ndarray, y: np.ndarray, numbers: np.ndarray) -> None:
        cells[starts[numbers] + y * shapes[numbers, 0] + x] = True

    inside = cells_inside(corners)
    mark(inside.x, inside.y, flat.charts[inside.faces])
    for k in range(3):
        # Points on the outlines, half a cell apart.
        begin = corners[:, k]
        end = corners[:, (k + 1) % 3]
        lengths = np.linalg.norm(end - begin, axis=1)
        steps = np.ceil(2 * lengths).astype(np.int64) + 1
        counts = steps + 1
        rows = np.repeat(np.arange(len(steps)), counts)
        first = np.cumsum(counts) - counts
        numbers = np.arange(len(rows)) - first[rows]
        shares = (numbers / steps[rows])[:, None]
        points = begin[rows] * (1 - shares) + end[rows] * shares
        points = np.floor(points).astype(np.int64)
        mark(points[:, 0], points[:, 1], flat.charts[rows])
    masks = []
    for k, (width, height) in enumerate(shapes):
        mask = cells[starts[k] : starts[k + 1]].reshape(height, width)
        masks.append(_grown(mask))
    return masks


def _grown(mask: np.ndarray) -> np.ndarray:
    """Return a mask with the cells around it, which its border has room for. (h, w) bool"""
    tall = mask.copy()
    tall[1:] |= mask[:-1]
    tall[:-1] |= mask[1:]
    wide = tall.copy()
    wide[:, 1:] |= tall[:, :-1]
    wide[:, :-1] |= tall[:, 1:]
    return wide


def _is_small(mask: np.ndarray, cells: int) -> bool:
    """Return whether a chart goes into a gap of a grid of so many cells a row."""
    return mask.size < (cells / _SMALL) ** 2


def _dropped(masks: list[np.ndarray], cells: int, strategy: _Strategy) -> _Dropped:
    """Drop the large charts one after the other onto a grid of so many cells a row."""
    numbers = [k for k, mask in enumerate(masks) if not _is_small(mask, cells)]
    numbers.sort(key=lambda k: -strategy.size(masks[k]))
    positions: dict[int, _Position] = {}
    heights = np.zeros(cells, dtype=np.int64)
    for number in numbers:
        position = _drop(masks[number], heights, strategy.weight)
        if position is None:
            return _Dropped({}, _HIGHEST * cells)
        positions[number] = position
    return _Dropped(positions, int(heights.max(initial=0)))


def _filled(masks: list[np.ndarray], dropped: _Dropped, cells: int) -> tuple[list[_Position], int]:
    """Put the small charts into gaps.

    Returns:
        The positions of all charts, none where there is no room, and how many rows they take.
    """
    small = [k for k, mask in enumerate(masks) if _is_small(mask, cells)]
    positions = dict(dropped.positions)
    highest = dropped.height
    if len(positions) + len(small) < len(masks):
        return [], highest
    spare = sum(masks[k].size for k in small) // cells
    # Room for all of the small ones above the others.
    n_rows = highest + 3 * spare + _SPARE_ROWS
    is_occupied = np.zeros((n_rows, cells), dtype=bool)
    for number, position in positions.items():
        mask = np.rot90(masks[number], position.quarter_turns)
        height, width = mask.shape
        is_occupied[position.y : position.y + height, position.x : position.x + width] |= mask
    shapes = {k: masks[k].shape for k in small}
    gap_positions = _in_gaps(shapes, is_occupied, max(1, cells // _GAP_CELLS))
    if gap_positions is None:
        return [], _HIGHEST * cells
    positions.update(gap_positions)
    for number, position in gap_positions.items():
        highest = max(highest, position.y + masks[number].shape[0])
    return [positions[k] for k in range(len(masks))], highest


def _drop(mask: np.ndarray, heights: np.ndarray, weight: float) -> _Position | None:
    """Drop a chart where it leaves the least room below and above; None where it is too wide.

    Args:
        heights: Occupied rows of each column, which are raised. (cells,)
        weight: Of the room above, beside that below.
    """
    best = None
    least_cost = math.inf
    for turns in range(4):
        turned = np.rot90(mask, turns)
        height, width = turned.shape
        if width > len(heights):
            continue
        # The border leaves no column empty.
        bottom = turned.argmax(axis=0)
        windows = np.lib.stride_tricks.sliding_window_view(heights, width)
        rows = np.maximum((windows - bottom).max(axis=1), 0)
        below = width * rows + bottom.sum() - windows.sum(axis=1)
        costs = below + weight * width * (rows + height)
        x = int(costs.argmin())
        if costs[x] < least_cost:
            least_cost = costs[x]
            best = _Position(x, int(rows[x]), turns)
    if best is not None:
        turned = np.rot90(mask, best.quarter_turns)
        height, width = turned.shape
        tops = best.y + height - turned[::-1].argmax(axis=0)
        columns = slice(best.x, best.x + width)
        heights[columns] = np.maximum(heights[columns], tops)
    return best


def _in_gaps(
    shapes: dict[int, tuple[int, int]], is_occupied: np.ndarray, coarse: int
) -> dict[int, _Position] | None:
    """Put boxes into gaps, the largest first and each as low as it goes; None without room.

    Args:
        shapes: Height and width of each box in cells.
        is_occupied: Cells of charts that are there already. (H, W) bool
        coarse: Cells that are one cell of the grid on which gaps are looked for.
    """
    height = is_occupied.shape[0] // coarse
    width = is_occupied.shape[1] // coarse
    blocks = is_occupied[: height * coarse, : width * coarse]
    blocks = blocks.reshape(height, coarse, width, coarse)
    full = np.any(blocks, axis=(1, 3))
    groups: dict[tuple[int, int], list[int]] = {}
    for number, shape in shapes.items():
        box = (math.ceil(shape[0] / coarse), math.ceil(shape[1] / coarse))
        groups.setdefault(box, []).append(number)
    positions: dict[int, _Position] = {}
    for box in sorted(groups, key=lambda box: (-box[0] * box[1], box)):
        numbers = groups[box]
        for x, y in _free_boxes(full, box, len(numbers)):
            positions[numbers.pop()] = _Position(x * coarse, y * coarse)
        if numbers:
            return None
    return positions


def _free_boxes(full: np.ndarray, box: tuple[int, int], count: int) -> list[tuple[int, int]]:
    """Take up to so many boxes (height, width) without full cells; return their corners (x, y)."""
    tall, wide = box
    is_empty = _empty_boxes(full, box)
    corners: list[tuple[int, int]] = []
    for y in np.flatnonzero(is_empty.any(axis=1)):
        row = is_empty[y]
        x = int(row.argmax())
        while row[x] and len(corners) < count:
            full[y : y + tall, x : x + wide] = True
            corners.append((x, int(y)))
            # Boxes that would overlap this one.
            is_empty[y : y + tall, max(0, x - wide + 1) : x + wide] = False
            x = int(row.argmax())
        if len(corners) == count:
            break
    return corners


def _empty_boxes(full: np.ndarray, box: tuple[int, int]) -> np.ndarray:
    """Whether the box (height, width) that begins at each cell has no full cell. (H', W) bool

    64 cells of a row are the bits of a number; boxes grow by doubling, first down, then to the
    right.
    """
    tall, wide = box
    if tall > full.shape[0] or wide > full.shape[1]:
        return np.zeros((0, full.shape[1]), dtype=bool)
    packed_bits = np.packbits(~full, axis=1, bitorder="little")
    n_bytes = -(-packed_bits.shape[1] // 8) * 8
    padding = ((0, 0), (0, n_bytes - packed_bits.shape[1]))
    are_empty = np.pad(packed_bits, padding).view("<u8")
    height = 1
    while height < tall:
        step = min(height, tall - height)
        are_empty = are_empty[:-step] & are_empty[step:]
        height += step
    width = 1
    while width < wide:
        step = min(width, wide - width)
        are_empty = are_empty & _shifted(are_empty, step)
        width += step
    bits = np.unpackbits(are_empty.view(np.uint8), axis=1, bitorder="little")
    return bits[:, : full.shape[1]].astype(bool)


def _shifted(bits: np.ndarray, step: int) -> np.ndarray:
    """Move the bits of rows so many digits towards the first; zeros follow. (H, n) uint64"""
    words, rest = divmod(step, 64)
    shifted = np.zeros_like(bits)
    n = bits.shape[1] - words
    if n <= 0:
        return shifted
    shifted[:, :n] = bits[:, words:] >> np.uint64(rest)
    if rest:
        shifted[:, : n - 1] |= bits[:, words + 1 :] << np.uint64(64 - rest)
    return shifted


def _moved(flat: _Flat, packing: _Packing) -> np.ndarray:
    """Return the corners of the faces on the grid, in cells. (F, 3, 2)"""
    corners = flat.corners * packing.scale + _BORDER
    turns = np.array([position.quarter_turns for position in packing.positions])[flat.charts]
    origins = np.array([position[:2] for position in packing.positions])[flat.charts]
    shapes = np.array([mask.shape for mask in packing.masks])[flat.charts]
    heights = shapes[:, :1]
    widths = shapes[:, 1:]
    x = corners[..., 0]
    y = corners[..., 1]
    # As np.rot90 turns the cells.
    turned = [
        np.stack([x, y], axis=2),
        np.stack([y, widths - x], axis=2),
        np.stack([widths - x, heights - y], axis=2),
        np.stack([heights - y, x], axis=2),
    ]
    return np.choose(turns[:, None, None], turned) + origins[:, None]
