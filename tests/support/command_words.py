# SPDX-License-Identifier: Apache-2.0
"""Settings as a command line asks for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from sugar_pipeline.pipeline.pipeline_flags import full_parser, train_parser
from sugar_pipeline.pipeline.plan import PipelinePlan, plan_of
from sugar_utils.flags import FlagValues
from sugar_utils.settings import from_args, parser_of

Settings = TypeVar("Settings")


def parse(cls: type[Settings], words: Sequence[str], **chosen: Any) -> Settings:
    """Settings of a dataclass; chosen: what the script sets before."""
    parser = parser_of(None, cls)
    parser.set_defaults(**chosen)
    return from_args(cls, parser.parse_flags([*words]))


def full_flags(*words: object) -> FlagValues:
    """Flags of ``train_full_pipeline.py``."""
    return full_parser(None).parse_flags([str(word) for word in words])


def full_plan(*words: object) -> PipelinePlan:
    """The plan of ``train_full_pipeline.py`` with these flags."""
    return plan_of(full_flags(*words))


def train_plan(*words: object) -> PipelinePlan:
    """The plan of ``train.py`` with these flags."""
    return plan_of(train_parser(None).parse_flags([str(word) for word in words]))
