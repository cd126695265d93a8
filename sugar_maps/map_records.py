# SPDX-License-Identifier: Apache-2.0
"""Offsets and coordinate systems of maps, written into exports and their records.

Files with few digits have coordinates near zero; these say what to add to them.
"""

from __future__ import annotations

from pathlib import Path

from sugar_maps.map_placement import MapPlacement

_MEANING = "coordinates of the map = coordinates of this file, turned so that z is up, + map_offset"


def offset_file(target: Path) -> Path:
    """Return the text file beside an OBJ that says what to add to its coordinates."""
    return target.with_name(f"{target.stem}_offset.txt")


def write_offset_text(path: Path, placement: MapPlacement) -> None:
    """Write the system of the map in one line, and the offset in the next."""
    numbers = " ".join(repr(float(value)) for value in placement.offset)
    path.write_text(f"{placement.system_name}\n{numbers}\n", encoding="utf-8")


def note_values(placement: MapPlacement) -> dict[str, object]:
    """Return the offset and the system, for files that hold a few values."""
    return {
        "map_offset": placement.offset.tolist(),
        "map_system": placement.system_name,
        "epsg": placement.epsg,
        "map_meaning": _MEANING,
    }
