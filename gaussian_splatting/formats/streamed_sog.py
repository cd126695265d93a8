# SPDX-License-Identifier: Apache-2.0
"""Streamed SOG, PlayCanvas' format for web pages that load only what a camera needs.

An index, ``lod-meta.json``, names folders with SOG files that are not packed, and has a tree of
boxes. A leaf says for each level of detail which rows of which folder lie in its box; level 0 is
the finest.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from gaussian_splatting.core.cloud import GaussianCloud
from gaussian_splatting.data.images import IMAGE_ERRORS
from gaussian_splatting.formats.merging import merged_gaussians
from gaussian_splatting.formats.packing import columns, require_gaussians
from gaussian_splatting.formats.sog import META, read_sog_folder, sog_files
from sugar_utils.errors import UserError, reason_of
from sugar_utils.files import require_regular_file

INDEX = "lod-meta.json"
"""Name of the index, by which programs know the format."""

_VERSION = 1
_CHUNK_ROWS = 512 * 1024  # Gaussians of a folder at most
_LEAF_ROWS = 32 * 1024  # Gaussians of a leaf at most, in level 0
_RATIO = 4  # of the Gaussians of two levels
_LEAST_LEVEL = 10_000  # Gaussians that a coarser level has at least
_MOST_LEVELS = 4
_REACH = 3  # extent of a Gaussian in standard deviations


@dataclass
class _Box:
    """A node of the tree; a leaf has rows, the others have children."""

    low: np.ndarray  # (3,)
    high: np.ndarray  # (3,)
    children: tuple[_Box, ...] = ()
    rows: np.ndarray | None = None  # of the cloud, in the order of level 0, (N,)
    levels: tuple[GaussianCloud, ...] = ()
    places: dict[str, dict[str, int]] = field(default_factory=dict)  # by the number of the level

    def leaves(self) -> Iterator[_Box]:
        """Yield the leaves in the order of the tree."""
        if self.rows is not None:
            yield self
        for child in self.children:
            yield from child.leaves()

    def entry(self) -> dict[str, Any]:
        """Return the node as the index has it."""
        entry: dict[str, Any] = {
            "bound": {"min": self.low.tolist(), "max": self.high.tolist()},
        }
        if self.children:
            entry["children"] = [child.entry() for child in self.children]
        else:
            entry["lods"] = self.places
        return entry


def write_streamed_sog(path: Path, cloud: GaussianCloud) -> np.ndarray:
    """Write the index, and folders beside it under names that are not in use.

    After an error none of the folders stay.

    Returns:
        The order in which level 0 lies in the files. (N,)
    """
    require_gaussians(path, cloud)
    n_levels = level_count(len(cloud))
    tree = _tree(cloud, np.arange(len(cloud)), n_levels)
    leaves = list(tree.leaves())
    names: list[str] = []
    suffix = _unused_suffix(path.parent)
    try:
        for level in range(n_levels):
            for number, members in enumerate(_chunks(leaves, level)):
                name = f"{level}_{number}{suffix}"
                names.append(name)
                _write_chunk(path.parent / name, members, level, len(names) - 1)
        counts = [sum(len(leaf.levels[level]) for leaf in leaves) for level in range(n_levels)]
        content = {
            "version": _VERSION,
            "asset": {"generator": "sugar-trainer"},
            "count": sum(counts),
            "counts": counts,
            "lodLevels": n_levels,
            "filenames": [f"{name}/{META}" for name in names],
            "tree": tree.entry(),
        }
        path.write_text(json.dumps(content), encoding="utf-8")
    except BaseException:
        for name in names:
            shutil.rmtree(path.parent / name, ignore_errors=True)
        raise
    return np.concatenate([leaf.rows for leaf in leaves if leaf.rows is not None])


def level_count(n_gaussians: int) -> int:
    """Return how many levels of detail so many Gaussians get."""
    n_levels = 1
    while n_levels < _MOST_LEVELS and n_gaussians // _RATIO**n_levels >= _LEAST_LEVEL:
        n_levels += 1
    return n_levels


def _tree(cloud: GaussianCloud, rows: np.ndarray, n_levels: int) -> _Box:
    """Halve Gaussians along the longest side of their box until leaves are small enough.

    Args:
        cloud: All Gaussians.
        rows: Those of this node. (M,)
        n_levels: Levels of detail of a leaf.
    """
    if len(rows) <= _LEAF_ROWS:
        return _leaf(cloud, rows, n_levels)
    means = cloud.means.detach().cpu().numpy()[rows]
    axis = int(np.ptp(means, axis=0).argmax())
    order = np.argsort(means[:, axis], kind="stable")
    middle = len(rows) // 2
    lower = _tree(cloud, rows[order[:middle]], n_levels)
    upper = _tree(cloud, rows[order[middle:]], n_levels)
    low = np.minimum(lower.low, upper.low)
    high = np.maximum(lower.high, upper.high)
    return _Box(low, high, children=(lower, upper))


def _leaf(cloud: GaussianCloud, rows: np.ndarray, n_levels: int) -> _Box:
    levels = [cloud.select(torch.from_numpy(rows))]
    for _ in range(n_levels - 1):
        levels.append(merged_gaussians(levels[-1], _RATIO))
    values = columns(levels[0])
    reach = _REACH * np.exp(values["log_scales"]).max(axis=1, keepdims=True)
    low = (values["means"] - reach).min(axis=0)
    high = (values["means"] + reach).max(axis=0)
    return _Box(low, high, rows=rows, levels=tuple(levels))


def _chunks(leaves: Sequence[_Box], level: int) -> Iterator[list[_Box]]:
    """Yield leaves that share a folder."""
    members: list[_Box] = []
    n_rows = 0
    for leaf in leaves:
        n_more = len(leaf.levels[level])
        if members and n_rows + n_more > _CHUNK_ROWS:
            yield members
            members = []
            n_rows = 0
        members.append(leaf)
        n_rows += n_more
    yield members


def _write_chunk(folder: Path, members: Sequence[_Box], level: int, file_number: int) -> None:
    """Write the Gaussians of some leaves into a folder, and note where each leaf lies there."""
    parts = [leaf.levels[level] for leaf in members]
    offset = 0
    for leaf, part in zip(members, parts, strict=True):
        leaf.places[str(level)] = {"file": file_number, "offset": offset, "count": len(part)}
        offset += len(part)
    folder.mkdir(parents=True)
    for name, content in sog_files(_joined(parts)).items():
        (folder / name).write_bytes(content)


def _joined(parts: Sequence[GaussianCloud]) -> GaussianCloud:
    names = parts[0].tensors()
    tensors = {name: torch.cat([part.tensors()[name] for part in parts]) for name in names}
    return replace(parts[0], **tensors)


def _unused_suffix(folder: Path) -> str:
    """Return a suffix for names of folders that no folder of an earlier export has."""
    present = [path.name for path in folder.iterdir()]
    suffix = ""
    number = 0
    while any(re.fullmatch(rf"\d+_\d+{re.escape(suffix)}", name) for name in present):
        number += 1
        suffix = f"_{number}"
    return suffix


def chunk_folders(path: Path) -> list[Path]:
    """Return the folders that an index names; none where there is no readable index."""
    try:
        return [_inside(path, name).parent for name in _read_index(path).get("filenames", [])]
    except UserError:
        return []


class _Range(NamedTuple):
    """Rows of a file."""

    file: int
    first: int
    end: int


def read_streamed_sog(path: Path) -> GaussianCloud:
    """Read the finest level of an index, and its environment; or the ``meta.json`` of one folder.

    Raises:
        UserError: A file is missing or damaged, or of another version.
    """
    content = _read_index(path)
    if "tree" not in content:
        return read_sog_folder(path)
    try:
        files = [_inside(path, str(name)) for name in content["filenames"]]
        ranges = list(_finest_ranges(content["tree"]))
        environment = content.get("environment")
    except IMAGE_ERRORS as error:
        raise _damaged(path, error) from error
    clouds: dict[int, GaussianCloud] = {}
    parts = []
    for part in ranges:
        if not 0 <= part.file < len(files):
            raise UserError(f"{path}: names no file {part.file}; export it again")
        if part.file not in clouds:
            clouds[part.file] = read_sog_folder(files[part.file])
        cloud = clouds[part.file]
        if not 0 <= part.first < part.end <= len(cloud):
            raise UserError(
                f"{files[part.file]}: has no rows {part.first} to {part.end}; export it again"
            )
        parts.append(cloud.select(torch.arange(part.first, part.end, device=cloud.means.device)))
    if environment:
        parts.append(read_sog_folder(_inside(path, str(environment))))
    if not parts:
        raise UserError(f"{path}: holds no Gaussians; export it again")
    return _joined(parts)


def _read_index(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(require_regular_file(path).read_bytes())
        if not isinstance(content, dict):
            raise ValueError("no table")
        if "tree" in content and content.get("version", _VERSION) != _VERSION:
            raise ValueError(f"version {content['version']}, not {_VERSION}")
    except IMAGE_ERRORS as error:
        raise _damaged(path, error) from error
    return content


def _finest_ranges(node: dict[str, Any]) -> Iterator[_Range]:
    """Yield the rows of the finest level of each leaf; malformed content raises."""
    for child in node.get("children", []):
        yield from _finest_ranges(child)
    levels = node.get("lods", {})
    if levels:
        finest = levels[min(levels, key=int)]
        first = int(finest["offset"])
        yield _Range(int(finest["file"]), first, first + int(finest["count"]))


def _inside(path: Path, name: str) -> Path:
    """Return the path of a file that an index names, which lies in its folder."""
    parts = Path(name).parts
    if Path(name).is_absolute() or ".." in parts or len(parts) < 2:
        raise UserError(f"{path}: names a file outside of its folder, {name}; export it again")
    return path.parent / name


def _damaged(path: Path, error: Exception) -> UserError:
    return UserError(f"{path}: damaged, or no streamed SOG ({reason_of(error)}); export it again")
