# SPDX-License-Identifier: Apache-2.0
"""Pictures that know where they lie on a map: GeoTIFF 1.1, by tifffile."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from sugar_utils.libraries import load_package

NO_DATA = -9999.0
"""Value of pixels of a height model where there is nothing."""

# Tags and keys of GeoTIFF (OGC 19-008r4), and one of GDAL.
_PIXEL_SCALE = 33550
_TIE_POINT = 33922
_KEY_DIRECTORY = 34735
_ASCII_PARAMETERS = 34737
_GDAL_NO_DATA = 42113
_MODEL_TYPE_KEY = 1024
_RASTER_TYPE_KEY = 1025
_CITATION_KEY = 1026
_PROJECTED_SYSTEM_KEY = 3072
_UNIT_KEY = 3076
_PROJECTED = 1
_PIXEL_IS_AREA = 1
_USER_DEFINED = 32767
_METRE = 9001
_TILE = (256, 256)
_LARGE = 2**31  # bytes above which offsets need 64 bits


@dataclass(frozen=True)
class GeoPlace:
    """Where a picture lies."""

    left: float  # coordinate of its left edge
    top: float  # coordinate of its upper edge
    pixel: float  # side of a pixel
    epsg: int | None = None  # of the map; None where there is no code
    system: str = ""  # the map in words; empty where there is none


def load_tifffile(what: str) -> ModuleType:
    """Import tifffile; a ``UserError`` where it is missing.

    Args:
        what: The feature that needs it.
    """
    return load_package(what, "tifffile", "tifffile")[0]


def write_geotiff(path: Path, picture: np.ndarray, place: GeoPlace) -> None:
    """Write a picture, (H, W, 4) uint8 with transparency, or heights, (H, W) float32.

    Heights that are not finite become :data:`NO_DATA`.
    """
    tifffile = load_tifffile("writing a GeoTIFF")
    tags = _place_tags(place)
    options: dict[str, Any] = {"photometric": "minisblack"}
    if picture.ndim == 3:
        options = {"photometric": "rgb", "extrasamples": ["unassalpha"], "planarconfig": "contig"}
    else:
        picture = np.where(np.isfinite(picture), picture, np.float32(NO_DATA))
        tags.append((_GDAL_NO_DATA, "s", 0, f"{NO_DATA:g}", True))
    with path.open("wb") as file:
        tifffile.imwrite(
            file,
            picture,
            bigtiff=picture.nbytes > _LARGE,
            tile=_TILE,
            compression="adobe_deflate",
            metadata=None,
            software="sugar-trainer",
            extratags=tags,
            **options,
        )


def _place_tags(place: GeoPlace) -> list[tuple[Any, ...]]:
    """Return the tags with the place of a picture and the system of its map."""
    tags: list[tuple[Any, ...]] = [
        (_PIXEL_SCALE, "d", 3, (place.pixel, place.pixel, 0.0), True),
        (_TIE_POINT, "d", 6, (0.0, 0.0, 0.0, place.left, place.top, 0.0), True),
    ]
    if not place.system:
        return tags
    citation = f"{place.system.encode('ascii', 'replace').decode()}|"
    # Rows of key, tag of the value (0: the value stands here), count, value.
    keys = [
        (_MODEL_TYPE_KEY, 0, 1, _PROJECTED),
        (_RASTER_TYPE_KEY, 0, 1, _PIXEL_IS_AREA),
        (_CITATION_KEY, _ASCII_PARAMETERS, len(citation), 0),
        (_PROJECTED_SYSTEM_KEY, 0, 1, place.epsg or _USER_DEFINED),
        (_UNIT_KEY, 0, 1, _METRE),
    ]
    header = (1, 1, 1, len(keys))
    numbers = np.array([header, *keys], dtype=np.uint16).ravel()
    tags.append((_KEY_DIRECTORY, "H", len(numbers), tuple(numbers.tolist()), True))
    tags.append((_ASCII_PARAMETERS, "s", 0, citation, True))
    return tags
