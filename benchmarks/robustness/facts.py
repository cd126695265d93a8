# SPDX-License-Identifier: Apache-2.0
"""Results of readers as numbers that can be compared."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

Facts = dict[str, Any]
"""Numbers, texts and lists of numbers by name. Names that end with ``place`` are places in the
world, (3,); those that end with ``length`` are lengths in world units."""

TOLERANCE = 4e-3


@dataclass(frozen=True)
class Variant:
    """A valid file in another form, or a file that must be refused.

    Attributes:
        what: Description of the form.
        scale: World units per unit of the file as it was.
        shift: Where the origin of the file as it was lies, world units. (3,)
        changed: Facts that differ from those of the file as it was; None for those that are gone.
        ends: How reading may end.
    """

    what: str
    scale: float = 1.0
    shift: tuple[float, float, float] = (0.0, 0.0, 0.0)
    changed: Mapping[str, Any] = field(default_factory=dict)
    ends: tuple[str, ...] = ("accepted",)


REFUSED = ("refused",)
EITHER = ("accepted", "refused")


def expected_facts(facts: Facts, variant: Variant) -> Facts:
    """Facts of a variant of a file whose own facts are known."""
    expected: Facts = {}
    for name, value in facts.items():
        if name.endswith("place"):
            pairs = zip(value, variant.shift, strict=True)
            expected[name] = [number * variant.scale + shift for number, shift in pairs]
        elif name.endswith("length"):
            numbers = value if isinstance(value, list) else [value]
            scaled = [number * variant.scale for number in numbers]
            expected[name] = scaled if isinstance(value, list) else scaled[0]
        else:
            expected[name] = value
    expected.update(variant.changed)
    return {name: value for name, value in expected.items() if value is not None}


def differences(expected: Facts, facts: Facts, scale: float = 1.0) -> Iterator[str]:
    """Yield what differs between two sets of facts.

    Args:
        scale: Size of the scene in world units, for the tolerance of places and lengths.
    """
    for name in sorted({*expected, *facts}):
        if name not in facts:
            yield f"{name} is missing"
        elif name not in expected:
            yield f"{name} is unexpected"
        elif not _is_close(name, expected[name], facts[name], scale):
            yield f"{name} is {facts[name]}, not {expected[name]}"


def not_finite(facts: Facts) -> str:
    """Name of a fact that is no finite number; empty if there is none."""
    for name, value in facts.items():
        numbers = value if isinstance(value, list) else [value]
        if any(isinstance(number, float) and not math.isfinite(number) for number in numbers):
            return name
    return ""


def _is_close(name: str, expected: Any, value: Any, scale: float) -> bool:
    if isinstance(expected, list) and isinstance(value, list):
        pairs = zip(expected, value, strict=False)
        same_length = len(expected) == len(value)
        return same_length and all(_is_close(name, one, other, scale) for one, other in pairs)
    if not isinstance(expected, float) or not isinstance(value, (int, float)):
        return bool(expected == value)
    size = max(1.0, abs(expected))
    if name.endswith("place"):
        size = scale
    elif name.endswith("length"):
        size = max(scale, abs(expected))
    return abs(expected - value) <= TOLERANCE * size
