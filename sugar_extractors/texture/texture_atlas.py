# SPDX-License-Identifier: Apache-2.0
"""Where the triangles of a mesh lie in its texture.

``squares`` is the layout of SuGaR (Guédon & Lepetit, CVPR 2024): every pair of triangles fills
a square of texels, for any mesh. ``charts`` and ``xatlas`` unfold connected parts of the surface:
neighbours share texture coordinates, a texel covers about the same area everywhere, and the picture
can be painted on. ``charts`` takes seconds where the package xatlas takes minutes, and its charts
are larger; both are packed alike. Texel (x, y) has its centre at (x + 0.5, y + 0.5); x runs along u
and y along v.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import ModuleType

import numpy as np
import torch
from scipy import sparse
from scipy.sparse import csgraph
from torch import Tensor

from gaussian_splatting.data.cameras import Camera
from sugar_extractors.texture.chart_packing import packed
from sugar_extractors.texture.charts import Charts, unfold, with_areas_of, without_noise
from sugar_scene.triangle_rasterizer import rasterize_camera_triangles
from sugar_utils.device import float32_tensor
from sugar_utils.errors import UserError
from sugar_utils.libraries import load_package

ATLASES = ("squares", "charts", "xatlas")
SQUARE_MARGIN = 4  # texels of the side of a square that its triangles do not cover
MIN_SQUARE_SIZE = 5  # below this, the margins of a square leave its triangles no area
MAX_SIDE = 32_768  # larger textures are refused by graphics hardware and by many programs
FITTING_SHARE = 0.9  # of the triangles that a square is large enough for
CHARTS_FILLED = 0.6  # share of the texture that charts cover, as a rule
CHART_MARGIN = 2  # texels around a chart that continue it
_CHUNK_TEXELS = 1 << 22


@dataclass(frozen=True)
class Atlas:
    """Where the faces of a mesh lie in its texture."""

    kind: str  # one of ATLASES
    corners: Tensor  # texture coordinates of the corners of each face, in texels, (F, 3, 2) float32
    side: int  # texels
    square_size: int  # texels; 0 of charts
    # Edges at which charts end, as faces and the corners that they begin at, (E, 2) int64; None of
    # squares.
    outlines: Tensor | None = None

    @property
    def n_faces(self) -> int:
        """Number of faces."""
        return self.corners.shape[0]

    @property
    def uvs(self) -> Tensor:
        """Texture coordinates in [0, 1], v upwards. (F, 3, 2) float32"""
        return self.corners / self.side

    @property
    def filled_share(self) -> float:
        """Share of the texture that lies in triangles."""
        a, b, c = self.corners.double().unbind(1)
        ab = b - a
        ac = c - a
        doubled = ab[:, 0] * ac[:, 1] - ab[:, 1] * ac[:, 0]
        return float(doubled.abs().sum()) / 2 / self.side**2

    def texel_faces(self, first_row: int, end_row: int) -> Tensor:
        """Return the face of each texel of some rows, -1 for none.

        (end_row - first_row, side) int32
        """
        shape = (end_row - first_row, self.side)
        owners = torch.empty(shape, dtype=torch.int32, device=self.corners.device)
        faces_of_rows = self._square_faces if self.kind == "squares" else self._chart_faces
        # In parts, because the temporaries are several times the result.
        step = max(1, _CHUNK_TEXELS // self.side)
        for first in range(first_row, end_row, step):
            end = min(first + step, end_row)
            owners[first - first_row : end - first_row] = faces_of_rows(first, end)
        return owners

    def _chart_faces(self, first_row: int, end_row: int) -> Tensor:
        low = max(0, first_row - CHART_MARGIN)
        high = min(self.side, end_row + CHART_MARGIN)
        grown = self._rasterized_faces(low, high)
        for _ in range(CHART_MARGIN):
            grown = _grow(grown)
        return grown[first_row - low : end_row - low]

    def _square_faces(self, first_row: int, end_row: int) -> Tensor:
        device = self.corners.device
        size = self.square_size
        x = torch.arange(self.side, dtype=torch.int32, device=device)
        y = torch.arange(first_row, end_row, dtype=torch.int32, device=device)[:, None]
        square = (x // size) * (self.side // size) + y // size
        faces = square * 2 + (x % size < y % size).int()
        return torch.where(faces < self.n_faces, faces, -1).int()

    def _rasterized_faces(self, first_row: int, end_row: int) -> Tensor:
        """Return faces over texel centres: the image of a camera that looks at the plane z = 1."""
        flat = torch.nn.functional.pad(self.corners.reshape(-1, 2), (0, 1), value=1.0)
        faces = torch.arange(len(flat), dtype=torch.int32, device=flat.device).reshape(-1, 3)
        camera = Camera(
            name="texture",
            width=self.side,
            height=end_row - first_row,
            fx=1.0,
            fy=1.0,
            cx=0.0,
            cy=-float(first_row),
            rotation=np.eye(3),
            translation=np.zeros(3),
        )
        owners = rasterize_camera_triangles(flat, faces, camera).face
        return torch.where(owners < 0, self._tip_faces(first_row, end_row), owners)

    def _tip_faces(self, first_row: int, end_row: int) -> Tensor:
        """Return faces of the texels that filtering reads at their corners and chart outlines.

        A corner may lie over no centre of a texel, and neighbours must not take texels that
        filtering reads at an outline.
        """
        n_texels = (end_row - first_row) * self.side
        none = torch.iinfo(torch.int32).max
        owners = torch.full((n_texels + 1,), none, dtype=torch.int32, device=self.corners.device)
        points, face = self._read_points()
        low = (points - 0.5).floor().long()
        for dy, dx in ((0, 0), (0, 1), (1, 0), (1, 1)):
            x = low[:, 0] + dx
            y = low[:, 1] + dy - first_row
            is_inside = (x >= 0) & (x < self.side)
            is_inside &= (y >= 0) & (y < end_row - first_row)
            # The lowest face wins, whatever the order; the last place takes what lies outside.
            place = torch.where(is_inside, y * self.side + x, n_texels)
            owners.scatter_reduce_(0, place, face, "amin")
        owners = owners[:-1].view(-1, self.side)
        return torch.where(owners == none, -1, owners)

    def _read_points(self) -> tuple[Tensor, Tensor]:
        """Return face corners and places on chart outlines, (P, 2), and their faces, (P,)."""
        device = self.corners.device
        face = torch.arange(self.n_faces, dtype=torch.int32, device=device).repeat_interleave(3)
        points = self.corners.reshape(-1, 2)
        if self.outlines is None:
            return points, face
        owners, first = self.outlines.unbind(1)
        begin = self.corners[owners, first]
        end = self.corners[owners, (first + 1) % 3]
        lengths = (end - begin).norm(dim=1)
        steps = (2 * lengths).ceil().long() + 1
        rows = torch.arange(len(steps), device=device).repeat_interleave(steps)
        first_number = steps.cumsum(0) - steps
        number = torch.arange(len(rows), device=device) - first_number[rows]
        shares = (number / steps[rows])[:, None]
        between = begin[rows] * (1 - shares) + end[rows] * shares
        return torch.cat([points, between]), torch.cat([face, owners[rows].int()])


def make_atlas(kind: str, vertices: Tensor, faces: Tensor, square_size: int) -> Atlas:
    """Lay out the faces of a mesh in a texture.

    Args:
        kind: One of ``ATLASES``.
        vertices: World units. (V, 3)
        faces: (F, 3), F > 0
        square_size: Side in texels of the square of two faces; other kinds than ``squares`` get a
            texture of the same size.

    Raises:
        UserError: The texture would be too large, or the squares too small.
    """
    check_square_size(square_size)
    n_faces = faces.shape[0]
    per_axis = squares_per_axis(n_faces)
    side = per_axis * square_size
    if side > MAX_SIDE:
        largest = MAX_SIDE // per_axis
        advice = "extract a mesh of fewer triangles"
        if largest >= MIN_SQUARE_SIZE:
            advice = f"use --square_size {largest} or less"
        raise UserError(
            f"{n_faces:,} triangles at --square_size {square_size} need a texture of "
            f"{side} texels per side, more than {MAX_SIDE}; {advice}"
        )
    if kind == "squares":
        return squares_atlas(n_faces, square_size, vertices.device)
    charts = xatlas_charts(vertices, faces) if kind == "xatlas" else own_charts(vertices, faces)
    return packed_atlas(kind, charts, side, vertices.device)


def fitting_square_size(kind: str, vertices: Tensor, faces: Tensor, resolution: Tensor) -> int:
    """Return the size of a square with texels as large as pixels of the best view.

    Args:
        resolution: Pixels per squared world unit at the vertices. (V,)
    """
    n_faces = faces.shape[0]
    a, b, c = vertices[faces].unbind(1)
    pixels_per_area = resolution[faces].mean(dim=1)
    # Of the smaller sides, because the two that fill a square's are not the longest in general.
    lengths = torch.stack([a - b, b - c, c - a], dim=1).norm(dim=2)
    pixel_lengths = lengths.median(dim=1).values * pixels_per_area.sqrt()
    pixel_lengths = pixel_lengths[pixels_per_area > 0].sort().values
    texels = 0.0
    if len(pixel_lengths):
        texels = float(pixel_lengths[int(FITTING_SHARE * len(pixel_lengths))])
    texels_per_leg = max(1, math.ceil(texels))
    square_size = SQUARE_MARGIN + texels_per_leg
    if kind == "squares":
        return square_size
    areas = torch.linalg.cross(b - a, c - a).norm(dim=1).double() / 2
    n_pixels = float((areas * pixels_per_area).sum())
    # The same surface has at least as many texels as in squares.
    n_texels = max(n_pixels, n_faces * texels_per_leg**2 / 2)
    side = math.sqrt(n_texels / CHARTS_FILLED)
    return max(MIN_SQUARE_SIZE, math.ceil(side / squares_per_axis(n_faces)))


def largest_square_size(n_faces: int, texture_size: int) -> int:
    """Return the largest size of a square for a texture with a limited side.

    Raises:
        UserError: The faces do not fit.
    """
    per_axis = squares_per_axis(n_faces)
    if texture_size < MIN_SQUARE_SIZE * per_axis:
        raise UserError(
            f"{n_faces:,} triangles do not fit into a picture of {texture_size} texels per side; "
            f"use --texture_size {MIN_SQUARE_SIZE * per_axis} or more, or fewer triangles"
        )
    return texture_size // per_axis


def check_square_size(square_size: int) -> None:
    """Raise a UserError if a square has no room for its margins."""
    if square_size < MIN_SQUARE_SIZE:
        raise UserError(
            f"--square_size {square_size} leaves no room for two triangles and their margins; "
            f"use {MIN_SQUARE_SIZE} or more, 8 is usual"
        )


def squares_per_axis(n_faces: int) -> int:
    """Return how many squares of two faces lie along a side of the texture."""
    return int(math.sqrt(n_faces // 2 + 1) + 1)


def squares_atlas(n_faces: int, square_size: int, device: torch.device | str = "cpu") -> Atlas:
    """Return SuGaR's layout.

    Square k, at column k // n and row k % n, holds the faces 2 k and 2 k + 1.
    """
    size = square_size
    per_axis = squares_per_axis(n_faces)
    lower = [[size - 2, 1], [2, 1], [size - 2, size - 3]]
    upper = [[1, size - 1], [1, 3], [size - 3, size - 1]]
    local = torch.tensor([lower, upper], dtype=torch.float32, device=device)
    face = torch.arange(n_faces, device=device)
    square = face // 2
    column = torch.div(square, per_axis, rounding_mode="floor")
    origin = torch.stack([column, square % per_axis], dim=-1) * size
    corners = local[face % 2] + origin[:, None]
    return Atlas("squares", corners, side=size * per_axis, square_size=size)


def load_xatlas() -> ModuleType:
    """Return the package xatlas; raise a UserError where it is missing."""
    instead = "use --texture_atlas charts"
    return load_package("--texture_atlas xatlas", "xatlas", "xatlas", instead=instead)[0]


def own_charts(vertices: Tensor, faces: Tensor) -> Charts:
    """Unfold a mesh into charts. vertices: (V, 3) world units; faces: (F, 3)"""
    return unfold(vertices.detach().double().cpu().numpy(), faces.cpu().numpy())


def xatlas_charts(vertices: Tensor, faces: Tensor) -> Charts:
    """Unfold a mesh by the package xatlas. vertices: (V, 3) world units; faces: (F, 3)"""
    xatlas = load_xatlas()
    packing = xatlas.PackOptions()
    packing.create_image = False
    unwrapper = xatlas.Atlas()
    places = vertices.detach().double().cpu().numpy()
    corners = faces.cpu().numpy()
    # On noise xatlas takes twice as long and makes five times as many charts.
    unwrapper.add_mesh(
        np.ascontiguousarray(without_noise(places, corners), dtype=np.float32),
        np.ascontiguousarray(corners, dtype=np.uint32),
    )
    unwrapper.generate(pack_options=packing)
    _, indices, uvs = unwrapper.get_mesh(0)
    if indices.shape != tuple(faces.shape) or not unwrapper.width:
        raise UserError(
            f"xatlas could not unfold the mesh of {faces.shape[0]:,} triangles; "
            "use --texture_atlas charts"
        )
    # uvs are relative to each side of a texture that need not be square.
    size = np.array([unwrapper.width, unwrapper.height], dtype=np.float64)
    rows = indices.astype(np.int64)
    pairs = rows[:, [0, 1, 1, 2]].reshape(-1, 2)
    graph = sparse.coo_matrix((np.ones(len(pairs)), pairs.T), shape=(len(uvs), len(uvs)))
    _, components = csgraph.connected_components(graph, directed=False)
    _, numbers = np.unique(components[rows[:, 0]], return_inverse=True)
    charts = Charts(numbers.reshape(-1), uvs[rows] * size)
    return with_areas_of(charts, places, corners)


def packed_atlas(kind: str, charts: Charts, side: int, device: torch.device) -> Atlas:
    """Lay charts out in a texture of so many texels a side."""
    corners = float32_tensor(packed(charts, side)).to(device)
    return Atlas(kind, corners, side, square_size=0, outlines=_outlines(corners))


def _outlines(corners: Tensor) -> Tensor:
    """Return edges of a single face, as faces and the corners that they begin at. (E, 2) int64"""
    bits = corners.reshape(-1, 2).contiguous().view(torch.int32).long()
    place_bits = bits[:, 0] * (1 << 32) + (bits[:, 1] & 0xFFFFFFFF)
    distinct, rows = place_bits.unique(return_inverse=True)
    rows = rows.reshape(-1, 3)
    ends = torch.stack([rows, rows.roll(-1, dims=1)], dim=2).sort(dim=2).values
    edges = ends[..., 0] * len(distinct) + ends[..., 1]
    _, numbers, counts = edges.reshape(-1).unique(return_inverse=True, return_counts=True)
    n_faces_at_edge = counts[numbers].reshape(-1, 3)
    return (n_faces_at_edge == 1).nonzero()


def _grow(faces: Tensor) -> Tensor:
    """Give texels without a face that of a neighbour."""
    grown = faces.clone()
    padded = torch.nn.functional.pad(faces, (1, 1, 1, 1), value=-1)
    rows, columns = faces.shape
    # Side by side before corner to corner, so that the nearest texel is continued.
    for dy, dx in ((0, 1), (0, -1), (1, 0), (-1, 0), (1, 1), (1, -1), (-1, 1), (-1, -1)):
        y = 1 + dy
        x = 1 + dx
        neighbors = padded[y : y + rows, x : x + columns]
        grown = torch.where(grown < 0, neighbors, grown)
    return grown
