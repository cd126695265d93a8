# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: F403, F405
"""All stages together: pipelines, the demo, reports, metrics; the functions of ``api``."""

from typing import TYPE_CHECKING

import sugar_utils  # noqa: F401  before torch and pycolmap

if TYPE_CHECKING:
    from sugar_pipeline.api import *

__all__ = [
    "bake_texture",
    "extract_mesh",
    "load_gaussians",
    "load_scene",
    "refine",
    "render",
    "run",
    "train_coarse",
    "train_vanilla",
]


def __getattr__(name: str) -> object:
    """Load functions when they are used: the command does not wait for torch."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from sugar_pipeline import api

    return getattr(api, name)
