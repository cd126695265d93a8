# SPDX-License-Identifier: Apache-2.0
"""Folders in the shared temporary place: this user's own, or a new one with a random name."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from sugar_utils.files import temporary_cache

REPOSITORY = Path(__file__).resolve().parent.parent
UNSET = ("WARP_CACHE_PATH", "XDG_CACHE_HOME")
posix_only = pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX permissions")


@pytest.fixture(autouse=True)
def shared(tmp_path, monkeypatch) -> Path:
    """A temporary place of its own for each test."""
    path = tmp_path / "shared"
    path.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(path))
    return path


def test_folder_is_found_again(shared):
    first = temporary_cache("pictures")
    assert first.parent == shared
    assert temporary_cache("pictures") == first
    assert temporary_cache("kernels") != first


@posix_only
def test_nobody_else_may_enter():
    assert stat.S_IMODE(temporary_cache("pictures").stat().st_mode) == 0o700


@posix_only
@pytest.mark.parametrize("plant", ["link", "file", "open to all", "of another user"])
def test_what_somebody_planted_is_not_used(plant, tmp_path, shared):
    expected = temporary_cache("pictures")
    expected.rmdir()
    target = tmp_path / "target"
    target.mkdir()
    if plant == "link":
        expected.symlink_to(target)
    elif plant == "file":
        expected.write_text("in the way")
    else:
        expected.mkdir()
        expected.chmod(0o777)
        if plant == "of another user":
            if os.geteuid() != 0:
                pytest.skip("only the administrator can give a folder away")
            expected.chmod(0o700)
            os.chown(expected, 65534, 65534)
    found = temporary_cache("pictures")
    assert found != expected
    assert found.parent == shared
    assert not any(target.iterdir())
    assert stat.S_IMODE(found.stat().st_mode) == 0o700


KERNELS = """
import sys
from sugar_utils.entrypoint import run_main

def main():
    import torch, warp
    from sugar_utils.neighbors import nearest_neighbors
    nearest_neighbors(torch.rand(64, 3), 2)
    print(warp.config.kernel_cache_dir)

sys.exit(run_main(main))
"""

REFUSED = """
import os
from sugar_utils import files
from sugar_utils.errors import UserError

def refuse(folder, check=files.check_writable):
    # Permissions do not bind the administrator, who may run the tests.
    if str(folder).startswith(os.environ["HOME"]):
        raise UserError("read-only")
    return check(folder)

files.check_writable = refuse
"""


def kernel_folder(home: Path, shared: Path, before: str = "") -> Path:
    """Where a process with this home keeps compiled kernels, after it has said so in one line."""
    kept = {name: value for name, value in os.environ.items() if name not in UNSET}
    moved = {"HOME": str(home), "LOCALAPPDATA": str(home), "TMPDIR": str(shared)}
    done = subprocess.run(
        [sys.executable, "-c", before + KERNELS],
        cwd=REPOSITORY,
        env={**kept, **moved},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    said, folder = done.stdout.splitlines()
    assert said.startswith("warning: compiled kernels are kept in ")
    assert "WARP_CACHE_PATH" in said
    assert done.stderr == ""
    return Path(folder)


@pytest.mark.slow
def test_home_that_cannot_be_made_moves_the_kernels(tmp_path, shared):
    home = tmp_path / "home"
    home.write_text("a file")
    assert kernel_folder(home, shared).is_relative_to(shared)


@pytest.mark.slow
def test_folder_of_kernels_that_cannot_be_written_to_is_left_alone(tmp_path, shared):
    home = tmp_path / "home"
    home.mkdir()
    assert kernel_folder(home, shared, REFUSED).is_relative_to(shared)
    assert not [path for path in home.rglob("*") if path.is_file()]
