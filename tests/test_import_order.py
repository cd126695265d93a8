# SPDX-License-Identifier: Apache-2.0
"""Pillow is loaded before pycolmap, wherever the program is entered."""

import subprocess
import sys

import pytest

from tests.support.repository import FLOORS, ROOT, entry_points, name_of

MODULES = (*FLOORS, "tests", *(name_of(path)[:-3].replace("/", ".") for path in entry_points()))

SAVE_PICTURES = """
import io
import {module}
import pycolmap
import numpy as np
from PIL import Image
for side in (48, 600):
    for shape in ((side, side), (side, side, 3), (side, side, 4)):
        for _ in range(8):
            pixels = (np.arange(np.prod(shape)) % 251).astype(np.uint8).reshape(shape)
            Image.fromarray(pixels).save(io.BytesIO(), "PNG")
            Image.fromarray(pixels).save(io.BytesIO(), "PNG", optimize=True)
"""


def run_code(code: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("module", MODULES)
def test_import_loads_pillow_before_pycolmap(module):
    code = (
        f"import sys, {module}\n"
        "loaded = list(sys.modules)\n"
        "assert 'PIL._imaging' in loaded\n"
        "assert 'pycolmap' not in loaded[: loaded.index('PIL._imaging')]"
    )
    done = run_code(code)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_pictures_are_saved_beside_pycolmap():
    done = run_code(SAVE_PICTURES.format(module="sugar_utils"))
    assert done.returncode == 0, done.stderr
