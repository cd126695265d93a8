# SPDX-License-Identifier: Apache-2.0
"""PLY files of Gaussians and of coloured points, as 3DGS programs exchange them.

A Gaussian cloud has 62 float properties: position, unused normals, spherical harmonics (band 0,
then the other bands channel by channel), opacity logit, log scales and quaternion (wxyz).
"""

from __future__ import annotations

import contextlib
import re
import shutil
import struct
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from plyfile import PlyData, PlyElement, PlyParseError

from gaussian_splatting.core.cloud import (
    ANTIALIASED,
    CUTOFF,
    MAX_SH_DEGREE,
    NO_CUTOFF,
    GaussianCloud,
    finite_logits,
)
from gaussian_splatting.core.spherical_harmonics import rgb_to_sh
from gaussian_splatting.data.world_offset import near_offset, offset_for
from gaussian_splatting.formats.compressed_ply import is_compressed, uncompressed
from gaussian_splatting.formats.file_kinds import refuse_other_kinds
from gaussian_splatting.formats.packing import usable_rows
from sugar_utils.errors import Notify, UserError, explained
from sugar_utils.files import atomic_path, require_regular_file
from sugar_utils.memory import format_bytes

_N_REST = 3 * ((MAX_SH_DEGREE + 1) ** 2 - 1)
_PLAIN_COLORS = ("red", "green", "blue")
_REQUIRED = {"f_dc": 3, "scale": 3, "rot": 4}
COLOR_NAMES = (
    ("red", "green", "blue"),
    ("diffuse_red", "diffuse_green", "diffuse_blue"),
    ("r", "g", "b"),
    ("ambient_red", "ambient_green", "ambient_blue"),
    ("color_r", "color_g", "color_b"),
    ("scalar_red", "scalar_green", "scalar_blue"),
)
_CHUNK_ROWS = 16_384
_HEADER_BYTES = 1 << 16

GAUSSIAN_PROPERTIES = (
    "x",
    "y",
    "z",
    "nx",
    "ny",
    "nz",
    *(f"f_dc_{i}" for i in range(3)),
    *(f"f_rest_{i}" for i in range(_N_REST)),
    "opacity",
    *(f"scale_{i}" for i in range(3)),
    *(f"rot_{i}" for i in range(4)),
)


def write_gaussian_ply(path: Path, cloud: GaussianCloud) -> None:
    """Write a cloud with the 62 float32 properties of 3DGS, complete or not at all."""
    n = len(cloud)
    table = np.zeros((n, len(GAUSSIAN_PROPERTIES)), dtype="<f4")
    table[:, 0:3] = _flat_rows(cloud.means)
    table[:, 6:9] = _flat_rows(cloud.sh_dc)
    n_stored = cloud.sh_rest.shape[1]
    # Channel by channel, the coefficients of each.
    rest = np.zeros((n, 3, _N_REST // 3), dtype="<f4")
    rest[:, :, :n_stored] = cloud.sh_rest.detach().transpose(1, 2).to("cpu", torch.float32).numpy()
    table[:, 9 : 9 + _N_REST] = rest.reshape(n, _N_REST)
    table[:, 54:55] = _flat_rows(cloud.opacity_logits)
    table[:, 55:58] = _flat_rows(cloud.log_scales)
    table[:, 58:62] = _flat_rows(cloud.quats)
    record = np.dtype([(name, "<f4") for name in GAUSSIAN_PROPERTIES])
    comments = [ANTIALIASED] if cloud.antialiased else []
    if cloud.cutoff_deviations != NO_CUTOFF:
        comments.append(f"{CUTOFF} {cloud.cutoff_deviations!r}")
    _write_vertices(path, table.view(record).reshape(-1), comments)


def concatenate_gaussian_plys(sources: Sequence[Path], target: Path) -> int:
    """Write one file of the Gaussians of several, piece by piece; return their number.

    Args:
        sources: Files of :func:`write_gaussian_ply`, at least one, of one kind of Gaussians.
    """
    n_rows = [PlyHeader.read(path).n_rows for path in sources]
    first = PlyHeader.read(sources[0])
    header = first.text.replace(f"element vertex {first.n_rows}", f"element vertex {sum(n_rows)}")
    with atomic_path(target) as temporary, temporary.open("wb") as file:
        file.write(header.encode())
        for path in sources:
            with path.open("rb") as source:
                source.seek(len(PlyHeader.read(path).text))
                shutil.copyfileobj(source, file)
    return sum(n_rows)


class PlyHeader(NamedTuple):
    """The header of a PLY of Gaussians, with its last line end."""

    text: str
    n_rows: int

    @classmethod
    def read(cls, path: Path) -> PlyHeader:
        """Read the header of a file of :func:`write_gaussian_ply`."""
        with path.open("rb") as file:
            lines = list(iter(file.readline, b"end_header\n"))
        text = b"".join([*lines, b"end_header\n"]).decode()
        count = next(line for line in text.splitlines() if line.startswith("element vertex"))
        return cls(text, int(count.split()[2]))


def _flat_rows(tensor: torch.Tensor) -> np.ndarray:
    """Return a parameter on the host with one row for each Gaussian. (N, ...) -> (N, C) float32"""
    return tensor.detach().flatten(start_dim=1).to("cpu", torch.float32).numpy()


def _write_vertices(path: Path, vertices: np.ndarray, comments: Sequence[str] = ()) -> None:
    element = PlyElement.describe(vertices, "vertex")
    data = PlyData([element], text=False, byte_order="<", comments=comments)
    with atomic_path(path) as temporary:
        data.write(str(temporary))


def holds_gaussians(path: Path) -> bool:
    """Whether a PLY holds Gaussians, compressed or not, as opposed to points or a mesh."""
    data = _read_ply(path)
    names = set(data["vertex"].data.dtype.names)
    return is_compressed(data) or "f_dc_0" in names or _has_plain_colors(names)


def _has_plain_colors(names: Collection[str]) -> bool:
    """Whether Gaussians have colours in place of coefficients of spherical harmonics."""
    return {*_PLAIN_COLORS, "opacity", "scale_0", "rot_0"} <= set(names)


def read_gaussian_ply(
    path: Path, notify: Notify = print, offset: np.ndarray | None = None
) -> GaussianCloud:
    """Read a Gaussian cloud written by any 3DGS program: on the CPU, float32, degree 3.

    Properties are found by name; compressed files of SuperSplat are uncompressed, and colours in
    place of ``f_dc_*`` become those. Infinite opacity logits become finite, see
    :func:`~gaussian_splatting.core.cloud.finite_logits`. Spherical harmonics below degree 3 are
    padded with zeros, other properties and the normals are ignored. Rows that are no Gaussians are
    dropped, see :func:`~gaussian_splatting.formats.packing.usable_rows`. The smoothing filter of a
    Mip-Splatting cloud (``filter_3D``, a standard deviation f) is fused: variances become s^2 + f^2
    and opacities shrink by the ratio of the volumes (Yu et al., CVPR 2024, section 5).

    Args:
        offset: Of a capture far from the origin, in world units, (3,); it is subtracted, before
            anything is rounded to float32, from files in the original coordinates.
    """
    data = _read_ply(path)
    vertices = data["vertex"].data
    if is_compressed(data):
        with ply_errors(path, "export it again, as an uncompressed 3DGS PLY"):
            vertices = uncompressed(data)
    layout = _gaussian_layout(path, vertices)
    table = _columns(vertices, layout.names)
    axes = layout.names[:3]
    table[:, :3] = _positions(vertices, axes, offset, path, notify)
    if layout.has_plain_colors:
        largest = 255.0 if vertices.dtype["red"].kind in "ui" else 1.0
        table[:, 3:6] = rgb_to_sh(table[:, 3:6] / largest)
    table[:, 6] = finite_logits(torch.from_numpy(table[:, 6])).numpy()
    if len(table) == 0:
        raise UserError(f"{path}: holds no Gaussians; choose another checkpoint")
    is_finite = np.asarray(np.isfinite(table).all(axis=1))
    is_usable = usable_rows(path, is_finite, table[:, 7:10], table[:, 10:14], notify)
    if not is_usable.all():
        table = table[is_usable]
    opacity_logits = table[:, 6:7]
    log_scales = table[:, 7:10]
    quats = table[:, 10:14]
    if layout.has_filter:
        notify(f"{path}: fused the 3D smoothing filter of Mip-Splatting into scales and opacities")
        opacity_logits, log_scales = _fuse_filter(opacity_logits, log_scales, table[:, -1:])
    n_bands = layout.n_rest // 3
    sh_rest = np.zeros((len(table), _N_REST // 3, 3), dtype=np.float32)
    stored = table[:, 14 : 14 + layout.n_rest].reshape(len(table), 3, n_bands)
    sh_rest[:, :n_bands] = stored.transpose(0, 2, 1)
    return GaussianCloud(
        means=_float_tensor(table[:, 0:3]),
        sh_dc=_float_tensor(table[:, 3:6]).unsqueeze(1),
        sh_rest=torch.from_numpy(sh_rest),
        opacity_logits=_float_tensor(opacity_logits),
        log_scales=_float_tensor(log_scales),
        quats=_float_tensor(quats),
        antialiased=ANTIALIASED in data.comments,
        cutoff_deviations=_cutoff(data.comments),
    )


def _cutoff(comments: Iterable[str]) -> float:
    """Standard deviations at which splats end, from the comment of a PLY."""
    for comment in comments:
        word, _, number = comment.partition(" ")
        if word == CUTOFF:
            with contextlib.suppress(ValueError):
                cutoff = float(number)
                return cutoff if cutoff > 0 else NO_CUTOFF
    return NO_CUTOFF


class _GaussianLayout(NamedTuple):
    """The properties of a PLY that a Gaussian cloud is read from."""

    # x, y, z, 3 colours, opacity, 3 scales, 4 parts of a quaternion, ``f_rest_*``, filter.
    names: list[str]
    n_rest: int  # number of ``f_rest_*``
    has_plain_colors: bool  # red, green and blue in place of ``f_dc_*``
    has_filter: bool  # the smoothing filter of Mip-Splatting


def _gaussian_layout(path: Path, vertices: np.ndarray) -> _GaussianLayout:
    """Choose the properties to read.

    Raises:
        UserError: Properties are missing, or of a wrong kind.
    """
    available = property_names(vertices)
    rest = _numbered(vertices, "f_rest")
    has_plain_colors = "f_dc_0" not in available and _has_plain_colors(available)
    has_filter = "filter_3D" in available
    _check_gaussian_properties(path, vertices, len(rest), has_plain_colors)
    # Other programs may have more of them.
    f_dc = [f"f_dc_{i}" for i in range(_REQUIRED["f_dc"])]
    scale = [f"scale_{i}" for i in range(_REQUIRED["scale"])]
    rot = [f"rot_{i}" for i in range(_REQUIRED["rot"])]
    colors = list(_PLAIN_COLORS) if has_plain_colors else f_dc
    names = ["x", "y", "z", *colors, "opacity", *scale, *rot, *rest]
    if has_filter:
        names.append("filter_3D")
    return _GaussianLayout(names, len(rest), has_plain_colors, has_filter)


def _float_tensor(values: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.array(values, dtype=np.float32, order="C"))


def _read_ply(path: Path) -> PlyData:
    require_regular_file(path)
    refuse_other_kinds(path)
    with ply_errors(path, "copy or export the file again"):
        data = PlyData.read(str(path))
    if "vertex" not in data:
        names = ", ".join(element.name for element in data.elements) or "none"
        raise UserError(f"{path}: has no element 'vertex' (it has: {names}); use another file")
    return data


@contextlib.contextmanager
def ply_errors(path: Path, advice: str) -> Iterator[None]:
    """Convert exceptions of plyfile into a ``UserError``.

    It trusts the header: malformed numbers surface as any of these errors.
    """
    kinds = (
        PlyParseError,
        OSError,
        ValueError,
        LookupError,
        TypeError,
        OverflowError,
        AttributeError,
        EOFError,
        RecursionError,
        struct.error,
    )
    try:
        with explained(f"{path}: damaged, truncated or no PLY", advice, *kinds):
            yield
    except MemoryError as error:
        raise does_not_fit(path) from error


def does_not_fit(path: Path) -> UserError:
    """Return the error for a PLY that is larger than the memory, or whose header is malformed."""
    size = path.stat().st_size
    with path.open("rb") as file:
        header = file.read(_HEADER_BYTES).split(b"end_header")[0]
    rows = sum(int(count) for count in re.findall(rb"(?m)^element \S+ (\d+)\s*$", header))
    if rows > size:
        return UserError(
            f"{path}: damaged PLY (its header promises {rows} rows in {size} bytes); "
            "copy or export the file again"
        )
    return UserError(
        f"{path}: out of memory reading its {format_bytes(size)}; close other programs, or use a "
        "machine with more memory"
    )


def _numbered(vertices: np.ndarray, prefix: str) -> list[str]:
    """Return the properties ``prefix_0``, ``prefix_1``, ... in the order of their numbers."""
    pattern = re.compile(rf"{prefix}_\d{{1,6}}")
    names = [name for name in property_names(vertices) if pattern.fullmatch(name)]
    return sorted(names, key=lambda name: int(name.rsplit("_", 1)[1]))


def _check_gaussian_properties(
    path: Path, vertices: np.ndarray, n_rest: int, has_plain_colors: bool
) -> None:
    """Raise a ``UserError`` if properties are missing, are lists, or are of no known degree."""
    required = ["x", "y", "z", "opacity"]
    for prefix, count in _REQUIRED.items():
        required += [f"{prefix}_{i}" for i in range(count)]
    if has_plain_colors:
        required = [name for name in required if not name.startswith("f_dc_")]
        required += _PLAIN_COLORS
    missing = [name for name in required if name not in property_names(vertices)]
    if missing:
        hint = "export it as an uncompressed 3DGS PLY"
        if missing == ["scale_2"]:
            hint = "it is a 2D Gaussian cloud; train it with 3D Gaussians"
        elif "f_dc_0" in missing and "red" in property_names(vertices):
            hint = "it is a point cloud, not Gaussians; use point_cloud/iteration_N/point_cloud.ply"
        raise UserError(f"{path}: lacks the properties {', '.join(missing)}; {hint}")
    columns = (*required, *_numbered(vertices, "f_rest"), "filter_3D")
    lists = [name for name in columns if _is_list(vertices, name)]
    if lists:
        raise UserError(f"{path}: {lists[0]} is a list; export it as an uncompressed 3DGS PLY")
    degrees = {3 * ((degree + 1) ** 2 - 1): degree for degree in range(MAX_SH_DEGREE + 1)}
    if n_rest not in degrees:
        raise UserError(
            f"{path}: {n_rest} properties f_rest_*, but spherical harmonics of degree 0 to "
            f"{MAX_SH_DEGREE} have {', '.join(map(str, degrees))}; export it with degree 3"
        )


def _is_list(vertices: np.ndarray, name: str) -> bool:
    """Whether a property, which may be missing, has a list in each row."""
    return name in property_names(vertices) and vertices.dtype[name].kind == "O"


def property_names(vertices: np.ndarray) -> tuple[str, ...]:
    """Return the names of a structured array's fields; none of a plain array."""
    return vertices.dtype.names or ()


def color_properties(vertices: np.ndarray) -> list[str] | None:
    """Return the names of the properties with red, green and blue; None without colours."""
    by_key = {name.lower(): name for name in property_names(vertices)}
    for red, green, blue in COLOR_NAMES:
        if {red, green, blue} <= by_key.keys():
            return [by_key[red], by_key[green], by_key[blue]]
    return None


def columns_of(rows: Any, names: Iterable[str]) -> np.ndarray:
    """Return named columns of a table side by side. (N, len(names)) float64"""
    return np.stack([np.asarray(rows[name], np.float64) for name in names], axis=1)


def _columns(vertices: np.ndarray, names: Sequence[str]) -> np.ndarray:
    """Return named properties side by side. (N, len(names)) float32"""
    table = np.empty((len(vertices), len(names)), dtype=np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        for start in range(0, len(vertices), _CHUNK_ROWS):
            rows = np.array(vertices[start : start + _CHUNK_ROWS])
            for column, name in enumerate(names):
                table[start : start + len(rows), column] = rows[name]
    return table


def _positions(
    vertices: np.ndarray,
    axes: Sequence[str],
    offset: np.ndarray | None,
    path: Path,
    notify: Notify,
) -> np.ndarray:
    """Return coordinates near the origin. (N, 3) float32

    Args:
        axes: Names of the coordinates.
        offset: See :func:`read_gaussian_ply`.
    """
    points = columns_of(vertices, axes)
    subtracted = np.zeros(3)
    if vertices[axes[0]].dtype.itemsize > 4:
        subtracted = near_offset(points, offset, path, notify)
    elif offset is not None:
        # Digits that are lost already do not come back.
        subtracted = offset_for(points, offset)
    with np.errstate(over="ignore", invalid="ignore"):
        return (points - subtracted).astype(np.float32)


def _fuse_filter(
    logits: np.ndarray, log_scales: np.ndarray, filter_std: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return logits and log scales of Gaussians convolved with an isotropic filter.

    Args:
        logits: (N, 1)
        log_scales: (N, 3)
        filter_std: Standard deviation in world units. (N, 1)
    """
    logits = logits.astype(np.float64)
    log_scales = log_scales.astype(np.float64)
    variances = np.exp(2 * log_scales) + filter_std.astype(np.float64) ** 2
    fused = 0.5 * np.log(variances)
    log_opacity = -np.logaddexp(0, -logits)
    log_opacity += (log_scales - fused).sum(axis=1, keepdims=True)
    # At f = 0 rounding could lift an opacity of nearly 1 to 1, whose logit is infinite.
    log_complement = np.log(-np.expm1(np.minimum(log_opacity, -1e-12)))
    log_odds = log_opacity - log_complement
    return np.where(filter_std == 0, logits, log_odds), fused


def write_point_ply(path: Path, points: np.ndarray, colors: np.ndarray) -> None:
    """Write coloured points as 3DGS does. points: (N, 3) world units; colors: (N, 3) uint8"""
    fields = [(name, "<f4") for name in ("x", "y", "z", "nx", "ny", "nz")]
    fields += [(name, "u1") for name in _PLAIN_COLORS]
    vertices = np.zeros(len(points), dtype=fields)
    for column, axis in enumerate("xyz"):
        vertices[axis] = points[:, column]
    for column, channel in enumerate(_PLAIN_COLORS):
        vertices[channel] = colors[:, column]
    _write_vertices(path, vertices)


def read_point_ply(
    path: Path, notify: Notify = print, offset: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Read points, (N, 3) float32 world units, and colours, (N, 3) uint8; grey without any.

    Args:
        offset: See :func:`read_gaussian_ply`.

    Raises:
        UserError: The file is damaged or holds no points.
    """
    vertices = _read_ply(path)["vertex"].data
    axes, color_names = _point_properties(path, vertices)
    points = _positions(vertices, axes, offset, path, notify)
    colors = _point_colors(vertices, color_names)
    if colors is None:
        notify(f"{path}: has no colours; the points start grey")
        colors = np.full(points.shape, 128, dtype=np.uint8)
    is_finite = np.isfinite(points).all(axis=1)
    if not is_finite.all():
        n_dropped = int((~is_finite).sum())
        notify(f"{path}: dropped {n_dropped} of {len(points)} points with NaN or infinity")
    return points[is_finite], colors[is_finite]


def read_point_table(path: Path) -> tuple[np.ndarray, np.ndarray | None]:
    """Read points in full coordinates, (N, 3) float64, and colours, (N, 3) uint8, or None.

    Raises:
        UserError: The file is damaged or holds no points.
    """
    vertices = _read_ply(path)["vertex"].data
    axes, color_names = _point_properties(path, vertices)
    points = columns_of(vertices, axes)
    return points, _point_colors(vertices, color_names)


def _point_properties(path: Path, vertices: np.ndarray) -> tuple[list[str], list[str]]:
    """Return the names of the coordinates, and of the colours where there are any."""
    names = {name.lower(): name for name in property_names(vertices)}
    missing = [name for name in ("x", "y", "z") if name not in names]
    if missing:
        raise UserError(f"{path}: lacks the properties {', '.join(missing)}; use a point cloud")
    axes = [names[axis] for axis in ("x", "y", "z")]
    color_names = color_properties(vertices) or []
    lists = [name for name in (*axes, *color_names) if _is_list(vertices, name)]
    if lists:
        raise UserError(f"{path}: {lists[0]} is a list in each row; use a point cloud")
    return axes, color_names


def _point_colors(vertices: np.ndarray, names: Sequence[str]) -> np.ndarray | None:
    """Convert colours of 8 or 16 bits, or floats from 0 to 1. (N, 3) uint8

    None without names, or where all are 0: programs write that for colours that they do not have.
    """
    if not names:
        return None
    values = np.stack([np.asarray(vertices[name]) for name in names], axis=1)
    if values.dtype.kind == "f":
        values = np.rint(np.nan_to_num(values) * 255)
    elif values.dtype.itemsize > 1 and values.max(initial=0) > 255:
        values = values // 257
    colors = np.clip(values, 0, 255).astype(np.uint8)
    return colors if colors.any() else None
