# SPDX-License-Identifier: Apache-2.0
"""Fixtures shared by all tests."""

import os
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def scenes_dir() -> Path:
    """Folder with the real test scenes (fox, bunny); skips where they are not at hand."""
    default = REPOSITORY.parent / "shared" / "scenes"
    path = Path(os.environ.get("SUGAR_SCENES", default))
    if not path.is_dir():
        pytest.skip(f"no test scenes at {path}; set SUGAR_SCENES to a folder that has them")
    return path
