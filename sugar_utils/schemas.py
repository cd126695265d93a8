# SPDX-License-Identifier: Apache-2.0
"""Schemas of files: one ``msgspec`` type per kind of file, checked where the file is read.

Numbers have bounds, which also reject infinity and not-a-number; unknown keys are allowed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from sugar_utils.errors import UserError
from sugar_utils.files import read_json

WRITE_AGAIN = "the file is damaged, write it again"
FAR = 1e15  # largest coordinate; squares of larger numbers do not fit into float32
MAX_DEPTH = 50  # maximum nesting depth of JSON input
Coordinate = Annotated[float, Meta(ge=-FAR, le=FAR)]
Positive = Annotated[float, Meta(gt=0, le=FAR)]
# Pixels of a side, which some programs write as a float.
PixelCount = Annotated[float, Meta(ge=1, le=2**20)]
Count = Annotated[int, Meta(ge=0, le=2**53)]
Seconds = Annotated[float, Meta(ge=0, le=FAR)]
# Any name that an operating system could have, bytes that are no UTF-8 included.
FileName = Annotated[str, Meta(min_length=1, pattern=r"^[^\x00\ud800-\udc7f\udd00-\udfff]*$")]
JsonObject = dict[str, Any]
T = TypeVar("T")


class Phase(msgspec.Struct):
    """Time and memory of a part of a run."""

    seconds: Seconds
    peak_bytes: Count


class RunRecord(msgspec.Struct):
    """``run.json`` of a training run."""

    status: str = ""
    settings: JsonObject = {}
    inputs: JsonObject = {}
    sources: JsonObject = {}
    timings: dict[str, Phase] = {}
    obsolete: list[FileName] | None = None
    held_out_views: list[FileName] | None = None
    dropped_views: dict[FileName, str] | None = None
    object_masks: Annotated[str, Meta(pattern=r"^[0-9a-f]{16}$")] | None = None
    world_offset: tuple[Coordinate, Coordinate, Coordinate] | None = None


class Figures(msgspec.Struct):
    """Figures of a result that reports add up."""

    seconds: Seconds = 0.0
    peak_bytes: Count = 0


class ResultNote(msgspec.Struct):
    """JSON file next to a mesh, with the settings and inputs that it was made with."""

    settings: JsonObject = {}
    inputs: JsonObject = {}
    sources: JsonObject = {}
    result: Figures = msgspec.field(default_factory=Figures)
    files: dict[FileName, Any] = {}
    replaces: JsonObject = {}


def conform(value: object, schema: type[T], context: object, advice: str = WRITE_AGAIN) -> T:
    """Convert JSON values to a schema.

    Args:
        value: The values.
        schema: The ``msgspec`` type.
        context: Where they are from, for messages.
        advice: How to fix them.

    Raises:
        UserError: They do not fit.
    """
    try:
        return msgspec.convert(value, schema)
    except msgspec.ValidationError as error:
        reason = str(error).replace("`", "")
        raise UserError(f"{context}: {reason}; {advice}") from error
    except UnicodeError as error:
        raise UserError(f"{context}: holds characters that do not exist; {advice}") from error


def read_checked(path: Path, schema: type) -> Any:
    """Read a JSON file of a schema, and return its values as they are.

    Raises:
        UserError: It cannot be read, or does not fit.
    """
    value = read_json(path)
    conform(value, schema, path)
    if is_deeper(value, MAX_DEPTH):
        raise UserError(f"{path}: nested more than {MAX_DEPTH} deep; {WRITE_AGAIN}")
    return value


def is_deeper(value: object, limit: int) -> bool:
    """Whether lists and objects are nested more than ``limit`` deep."""
    if not isinstance(value, dict | list | tuple):
        return False
    items = value.values() if isinstance(value, dict) else value
    return limit < 0 or any(is_deeper(item, limit - 1) for item in items)
