# SPDX-License-Identifier: Apache-2.0
"""Reader of XMP files of RealityScan (RealityCapture), one beside each image."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from sugar_capture.camera_readers.entries import (
    NO_IMAGE,
    NO_POSE,
    Entries,
    KnownCamera,
    SizeOf,
    SkippedCamera,
)
from sugar_capture.camera_readers.lenses import (
    RealityLens,
    reality_colmap_lens,
    require_rotation,
)
from sugar_capture.camera_readers.parsing import EXPORT_AGAIN, parse_numbers, read_xml
from sugar_utils.errors import UserError

XCR_NAMESPACE = "http://www.capturingreality.com/ns/xcr/1.1#"


def read_reality_xmp(files: Sequence[Path], size_of: SizeOf) -> Entries:
    """Read XMP files; images that were not aligned are skipped."""
    for path in files:
        properties = _XcrProperties(path)
        size = size_of(path.stem)
        if size is None:
            yield SkippedCamera(path.stem, NO_IMAGE)
            continue
        if not (properties.has("Rotation") and properties.has("Position")):
            yield SkippedCamera(path.stem, NO_POSE)
            continue
        parameters = properties.lens()
        rotation = properties.rotation()
        lens = reality_colmap_lens(parameters, size, str(path))
        yield KnownCamera(path.stem, lens, rotation, properties.numbers("Position", 3))


class _XcrProperties:
    """The properties of RealityScan in an XMP file, which are attributes or elements."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._texts: dict[str, str | None] = {}
        for element in read_xml(path).iter():
            self._texts.update(element.items())
            self._texts[element.tag] = element.text

    def has(self, name: str) -> bool:
        """Whether the file has a property."""
        return _qualified(name) in self._texts

    def numbers(self, name: str, count: int, unset: str | None = None) -> np.ndarray:
        """Parse the numbers of a property. (count,)

        Args:
            unset: Text of a property that the file does not have.
        """
        text = self._texts.get(_qualified(name), unset)
        return parse_numbers(text, count, f"{self._path}, xcr:{name}")

    def number(self, name: str, unset: str | None = None) -> float:
        """Parse the number of a property, see :meth:`numbers`."""
        return float(self.numbers(name, 1, unset)[0])

    def lens(self) -> RealityLens:
        """Read the intrinsics.

        Raises:
            UserError: The lens has a distortion, skew or aspect ratio that is not supported.
        """
        model = self._texts.get(_qualified("DistortionModel"), "perspective") or ""
        # Spelt with one f in the files.
        coefficients = self.numbers("DistortionCoeficients", 6, "0 0 0 0 0 0")
        if coefficients.any() and not model.startswith(("brown", "perspective")):
            raise UserError(
                f"{self._path}, xcr:DistortionModel: {model} is not supported; choose a Brown "
                "model in the settings of the alignment"
            )
        if self.number("Skew", "0") != 0 or self.number("AspectRatio", "1") != 1:
            raise UserError(
                f"{self._path}: xcr:Skew and xcr:AspectRatio must be 0 and 1; {EXPORT_AGAIN}"
            )
        return RealityLens(
            focal=self.number("FocalLength35mm"),
            u=self.number("PrincipalPointU"),
            v=self.number("PrincipalPointV"),
            radial=coefficients[:4].tolist(),
            t1=coefficients[4],
            t2=coefficients[5],
        )

    def rotation(self) -> np.ndarray:
        """Read the rotation from world to camera. (3, 3)"""
        return require_rotation(self.numbers("Rotation", 9), f"{self._path}, xcr:Rotation")


def _qualified(name: str) -> str:
    return f"{{{XCR_NAMESPACE}}}{name}"
