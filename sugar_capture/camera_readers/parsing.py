# SPDX-License-Identifier: Apache-2.0
"""Numbers, text and XML of files of other programs, with errors that name file and element."""

from __future__ import annotations

import contextlib
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import numpy as np
from msgspec import Meta

from sugar_utils.errors import UserError, explained
from sugar_utils.files import decoded, require_regular_file
from sugar_utils.schemas import FAR, Coordinate

EXPORT_AGAIN = "export the cameras again"
Vector = Annotated[list[Coordinate], Meta(min_length=3, max_length=3)]


def parse_numbers(text: str | None, count: int, context: str) -> np.ndarray:
    """Parse numbers that are separated by spaces. (count,) float64

    Args:
        context: File and element, for the message of an error.

    Raises:
        UserError: There are more or fewer numbers, or one is not finite.
    """
    with explained(f"{context}:", EXPORT_AGAIN, ValueError):
        words = (text or "").split()
        values = np.array([float(word) for word in words])
    if len(values) != count or not (np.abs(values) <= FAR).all():
        raise UserError(
            f"{context}: needs {count} finite numbers, not {text!r:.40}; {EXPORT_AGAIN}"
        )
    return values


def parse_number(text: str | None, context: str) -> float:
    """Parse one number, see :func:`parse_numbers`."""
    values = parse_numbers(text, 1, context)
    return float(values[0])


def with_decimal_point(text: str) -> str:
    """Return the text of a number with a decimal point in place of a decimal comma.

    A text with a point, or with several commas, stays: its commas part thousands.
    """
    has_decimal_comma = text.count(",") == 1 and "." not in text
    return text.replace(",", ".") if has_decimal_comma else text


def read_bytes(path: Path, count: int = -1) -> bytes:
    """Read the first ``count`` bytes of a file; -1 reads all of it."""
    with (
        explained(f"cannot read {path}:", "check the path"),
        require_regular_file(path).open("rb") as file,
    ):
        return file.read(count)


def decoded_text(path: Path, count: int = -1) -> str:
    """Read a text file; bytes that are not UTF-8 are kept as :func:`os.fsdecode` keeps them."""
    content = read_bytes(path, count)
    if count >= 0:
        # Do not cut a character of 16 bits in half.
        even_length = len(content) // 2 * 2
        content = content[:even_length]
    return _decode(content).replace("\0", "")


def _decode(content: bytes) -> str:
    with contextlib.suppress(UnicodeError):
        return decoded(content, "surrogateescape")
    return content.decode("utf-8", "surrogateescape")


def read_xml(path: Path) -> ET.Element:
    """Read an XML file and return its root element."""
    kinds = (ET.ParseError, ValueError, LookupError)
    with explained(f"{path}: not valid XML", EXPORT_AGAIN, *kinds):
        return ET.fromstring(read_bytes(path))


def require_child(parent: ET.Element, name: str, context: str) -> ET.Element:
    """Return a child element by its name.

    Raises:
        UserError: There is none.
    """
    child = parent.find(name)
    if child is None:
        raise UserError(f"{context}: has no {name}; {EXPORT_AGAIN}")
    return child


def has_words(*words: bytes, within: int = 4096) -> Callable[[Path], bool]:
    """Return a test whether the first ``within`` bytes of a file have all words."""

    def accepts(path: Path) -> bool:
        content = read_bytes(path, within)
        return all(word in content for word in words)

    return accepts
