# SPDX-License-Identifier: Apache-2.0
"""Flags of where a capture stands on a map, and the placement that is found.

A placement is a similarity from the world of the capture to coordinates near zero, and an offset to
add to these, because float32 has too few digits for coordinates of a map.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from sugar_maps import map_systems
from sugar_maps.map_systems import MapSystem, TangentPlane
from sugar_maps.printed_targets import DEFAULT_KIND, TARGET_KINDS
from sugar_maps.similarity import Similarity, root_mean_square
from sugar_utils.errors import UserError
from sugar_utils.flags import positive_float, positive_int
from sugar_utils.settings import flag

GPS_CHOICES = ("auto", "none")
CONTROL = "control"
CHECK = "check"
LEFT_OUT = "left out"
MAP_MEANING = (
    "map = matrix x (x, y, z, 1) of the capture + offset; rows of 4; x east, y north, z up"
)
_flag = partial(flag, group="map")


@dataclass(frozen=True)
class MapFlags:
    """Flags of where a capture stands on a map."""

    gcp: tuple[Path, ...] | None = _flag(
        None,
        "put it on the map by control points: a gcp_list.txt of OpenDroneMap, or the markers "
        "of Metashape as CSV and a second CSV with image, marker, x, y; needs the scene",
        parse=Path,
        nargs="+",
        metavar="FILE",
    )
    gps: str = _flag(
        "none",
        "auto: put it on the map by the GPS of the photographs; needs the scene",
        choices=GPS_CHOICES,
        no_effect_when="with --gcp, which is more exact",
    )
    epsg: int | None = _flag(
        None,
        "code of the map's coordinate system, in metres; unset: that of --gcp, or the zone of UTM; "
        "metres east and north of the middle where pyproj is not installed",
        parse=positive_int,
        no_effect_when="it is an error without --gcp and --gps auto",
    )

    targets: str | None = _flag(
        None,
        f"find printed targets in the photographs ({DEFAULT_KIND} unless another kind follows): "
        "points of --gcp without pixels are the targets whose numbers they have, and --target_size "
        "gives the scale; needs the scene",
        choices=tuple(TARGET_KINDS),
        nargs="?",
        const=DEFAULT_KIND,
        metavar="KIND",
    )
    target_size: float | None = _flag(
        None,
        "side of the printed targets in metres, which makes results metres: by itself, or for the "
        "scale of --gps auto",
        parse=positive_float,
        no_effect_when="with --gcp, whose points give the scale, it only checks; without --targets "
        "it is an error",
    )

    def __post_init__(self) -> None:
        if self.target_size is not None and self.targets is None:
            raise UserError("--target_size is the side of printed targets; pass --targets, too")
        if self.targets is not None and self.target_size is None and self.gcp is None:
            raise UserError(
                "--targets needs the side of the targets in metres, --target_size, or a file with "
                "their coordinates, --gcp"
            )
        if self.epsg is None:
            return
        if not self.wanted:
            raise UserError("--epsg says in which system a map is; pass --gcp or --gps auto, too")
        # Refused where it is none for a map.
        _ = self.system

    @property
    def system(self) -> MapSystem | None:
        """The system that ``epsg`` names, None where it is not given; an error if no map has it."""
        if self.epsg is None:
            return None
        place = f"--epsg {self.epsg}"
        system = map_systems.system_of_code(self.epsg, place)
        map_systems.require_metres(system, place)
        return system

    @property
    def wanted(self) -> bool:
        """Whether anything is to be put on a map."""
        return self.gcp is not None or self.gps == "auto"

    @property
    def scales(self) -> bool:
        """Whether results are made metres by printed targets, and are not put on a map."""
        return self.target_size is not None and not self.wanted


class Residual(NamedTuple):
    """The difference between a place on the map and the same place of the capture."""

    name: str
    role: str  # control, check, or left out
    difference: np.ndarray  # place of the capture minus that of the map, metres, (3,)
    pixels: float | None = None  # error of its pixels; None for GPS

    @property
    def distance(self) -> float:
        """Length of the difference, metres."""
        return float(np.linalg.norm(self.difference))


class TargetResidual(NamedTuple):
    """A printed target after the placement, compared with its printed size."""

    number: int
    n_images: int  # photographs that show it
    side: float  # metres
    difference: float | None  # of the side from that of the print, metres; None: not given
    pixels: float  # error of its corners
    is_used: bool  # for the scale; where that is of other points, whether the size is that of most

    def row(self) -> dict[str, object]:
        """Return it as values for a JSON file."""
        return {
            "number": self.number,
            "photographs": self.n_images,
            "side": self.side,
            "difference": self.difference,
            "pixels": self.pixels,
            "used": self.is_used,
        }


@dataclass(frozen=True)
class MapPlacement:
    """A similarity from the world of a capture to a map, and how well it fits."""

    similarity: Similarity  # to the map's coordinates minus the offset
    offset: np.ndarray  # (3,) float64
    system: MapSystem | None  # None: a plane that touches the earth at ``plane``
    plane: TangentPlane | None
    source: str  # control points or GPS
    residuals: list[Residual] = field(default_factory=list)
    targets: list[TargetResidual] = field(default_factory=list)

    @property
    def matrix(self) -> np.ndarray:
        """The matrix to coordinates near zero. (4, 4)"""
        return self.similarity.matrix

    @property
    def epsg(self) -> int | None:
        """The code of the map's system; None where it has none."""
        return None if self.system is None else self.system.epsg

    @property
    def system_name(self) -> str:
        """The map's system, in words."""
        if self.system is not None:
            return self.system.name
        plane = self.plane
        if plane is None:
            return "metres, in the system of the control points"
        place = f"{plane.latitude:.8f}, {plane.longitude:.8f}, {plane.altitude:.3f}"
        return f"metres east, north and up of latitude, longitude, altitude {place}"

    def rms(self, role: str) -> float:
        """Return the root mean square of the distances of points with a role, metres."""
        return root_mean_square(np.array([r.distance for r in self.residuals if r.role == role]))

    def record(self) -> dict[str, object]:
        """Return the placement as values for a JSON file."""
        residuals = []
        for residual in self.residuals:
            row: dict[str, object] = {
                "name": residual.name,
                "role": residual.role,
                "difference": residual.difference.tolist(),
                "distance": residual.distance,
            }
            if residual.pixels is not None:
                row["pixels"] = residual.pixels
            residuals.append(row)
        plane = self.plane
        record: dict[str, object] = {
            "matrix": self.matrix.tolist(),
            "offset": self.offset.tolist(),
            "meaning": MAP_MEANING,
            "system": self.system_name,
            "epsg": self.epsg,
            "origin": None if plane is None else [plane.latitude, plane.longitude, plane.altitude],
            "scale": self.similarity.scale,
            "source": self.source,
            "rms": self.rms(CONTROL),
            "check_rms": self.rms(CHECK),
            "residuals": residuals,
        }
        if self.targets:
            record["targets"] = [target.row() for target in self.targets]
        return record

    def describe(self) -> str:
        """Describe how well it fits, in one line."""
        parts = []
        for role in (CONTROL, CHECK):
            rows = [residual for residual in self.residuals if residual.role == role]
            if rows:
                worst = max(rows, key=lambda residual: residual.distance)
                parts.append(
                    f"{len(rows)} {role}, {self.rms(role):.3g} m RMS, at most "
                    f"{worst.distance:.3g} m ({worst.name})"
                )
        if self.targets:
            parts.append(describe_targets(self.targets))
        fit = "; ".join(parts)
        return (
            f"on the map by {self.source}: {fit}; {self.similarity.scale:.6g} m a unit; "
            f"{self.system_name}"
        )


def describe_targets(targets: Sequence[TargetResidual]) -> str:
    """Describe in a few words how well targets fit their size; their number where none is given."""
    differences = {
        target.number: abs(target.difference)
        for target in targets
        if target.difference is not None and target.is_used
    }
    if not differences:
        return f"{len(targets)} targets"
    worst = max(differences, key=differences.__getitem__)
    rms = root_mean_square(np.array(list(differences.values())))
    return (
        f"sides of {len(differences)} targets, {1000 * rms:.3g} mm RMS, at most "
        f"{1000 * differences[worst]:.3g} mm ({worst})"
    )
