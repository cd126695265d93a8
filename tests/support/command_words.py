# SPDX-License-Identifier: Apache-2.0
"""Settings as a command line asks for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from sugar_utils.settings import from_args, parser_of

Settings = TypeVar("Settings")


def parse(cls: type[Settings], words: Sequence[str], **chosen: Any) -> Settings:
    """Settings of a dataclass; chosen: what the script sets before."""
    parser = parser_of(None, cls)
    parser.set_defaults(**chosen)
    return from_args(cls, parser.parse_args([*words]))
