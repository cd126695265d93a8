# SPDX-License-Identifier: Apache-2.0
"""Files with a note beside them, and folders that one process works in at a time."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from gaussian_splatting.formats.ply import write_gaussian_ply
from gaussian_splatting.scenes.scene import VanillaSize, load_scene
from sugar_extractors.outputs.result_folder import FinalResults, write_result_folder
from sugar_extractors.placing import PlacementOptions
from sugar_utils import files as file_writing
from sugar_utils.errors import UserError
from sugar_utils.files import exclusive
from sugar_utils.recipe import Recipe
from tests.support.tiny_scene import make_tiny_scene

OLD, NEW = Recipe({"size": 1}), Recipe({"size": 2})
ADVICE = "wait"


def files_of(folder: Path, *suffixes: str) -> list[Path]:
    return [folder / f"mesh{suffix}" for suffix in suffixes]


def write(files: list[Path], identity: Recipe) -> None:
    with identity.publish(files, lambda: {"figure": 1}) as targets:
        for file, target in targets.items():
            target.write_text(f"{file.name} {identity.settings}")


def finished(files: list[Path], identity: Recipe, overwrite: bool = False) -> bool:
    return identity.is_finished(files, overwrite, "--output_dir")


def test_a_result_is_finished_for_what_it_was_made_from_and_nothing_else(tmp_path):
    files = files_of(tmp_path, ".png", ".obj")
    assert not finished(files, OLD)
    write(files, OLD)
    assert finished(files, OLD)
    with pytest.raises(UserError, match=r"size: 1 → 2.*--overwrite True.*another --output_dir"):
        finished(files, NEW)
    assert not finished(files, NEW, overwrite=True)
    files[0].unlink()
    assert not finished(files, OLD)
    note = json.loads((tmp_path / "mesh.json").read_text())
    assert note["result"] == {"figure": 1}


def test_a_result_that_somebody_painted_on_is_kept(tmp_path):
    files = files_of(tmp_path, ".png", ".obj")
    write(files, OLD)
    files[0].write_text("painted")
    assert finished(files, OLD)


def test_files_that_the_new_result_lacks_go_with_the_old_one(tmp_path):
    write(files_of(tmp_path, ".png", ".glb", ".obj"), OLD)
    (tmp_path / "other.glb").write_text("mine")
    write(files_of(tmp_path, ".png", ".obj"), NEW)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "mesh.json",
        "mesh.obj",
        "mesh.png",
        "other.glb",
    ]


@pytest.mark.parametrize("n_renames", range(5))
def test_whatever_moment_a_replacement_ends_in_it_is_known_what_is_there(
    tmp_path, monkeypatch, n_renames
):
    files = files_of(tmp_path, ".png", ".obj")
    write(files, OLD)
    real, done = file_writing._replace, []

    def die(source, target):
        if len(done) == n_renames:
            raise SystemExit(9)
        done.append(target)
        real(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(file_writing, "_replace", die)
        # Note, picture, mesh, note: the fifth time nothing is left to be interrupted.
        if n_renames < 4:
            with pytest.raises(SystemExit):
                write(files, NEW)
        else:
            write(files, NEW)
    new = [f"{NEW.settings}" in file.read_text() for file in files]
    if all(new):
        assert finished(files, NEW)
    elif not any(new):
        assert finished(files, OLD)
    else:
        # Neither: it is made again, and no mixture is returned.
        assert not finished(files, NEW)
        with pytest.raises(UserError):
            finished(files, OLD)
    assert not list(tmp_path.glob("*.tmp-*"))


def test_a_full_disk_leaves_the_old_result(tmp_path):
    files = files_of(tmp_path, ".png", ".obj")
    write(files, OLD)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def write_on_a_full_disk():
        with NEW.publish(files, dict) as targets:
            targets[files[0]].write_text("new")
            raise OSError(28, "No space left on device")

    with pytest.raises(UserError, match="No space left"):
        write_on_a_full_disk()
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_folder_has_one_owner_who_is_named_and_leaves_no_trace(tmp_path):
    with exclusive(tmp_path, ADVICE):
        whose = rf"process {os.getpid()} on {socket.gethostname()} since 20.*; wait"
        with pytest.raises(UserError, match=whose), exclusive(tmp_path, ADVICE):
            pass
        with exclusive(tmp_path, ADVICE, name=".other.lock"):
            pass
    assert not list(tmp_path.iterdir())
    with exclusive(tmp_path, ADVICE):
        pass


def test_the_lock_of_a_process_that_was_killed_holds_nobody_up(tmp_path):
    code = (
        "import os, sys; from pathlib import Path; from sugar_utils.files import exclusive\n"
        "with exclusive(Path(sys.argv[1]), ''):\n    os._exit(9)"
    )
    root = Path(__file__).resolve().parent.parent
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=root, check=False)
    assert done.returncode == 9
    assert (tmp_path / ".lock.json").is_file()
    with exclusive(tmp_path, ADVICE):
        pass
    assert not list(tmp_path.iterdir())


def test_a_folder_without_locks_is_used_all_the_same(tmp_path, monkeypatch):
    def refuse(self, **_):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("sugar_utils.files.FileLock.acquire", refuse)
    with exclusive(tmp_path, ADVICE), exclusive(tmp_path, ADVICE):
        pass


@pytest.mark.parametrize("name", ["transform.json", "splats.ply"])
def test_a_folder_in_the_place_of_a_file_to_take_away_is_one_line(tmp_path, name):
    tiny = make_tiny_scene(tmp_path / "scene", 4)
    write_gaussian_ply(tmp_path / "a.ply", tiny.cloud)
    scene = load_scene(tiny.root, size_rule=VanillaSize(-1), notify=pytest.fail)
    results = FinalResults(None, tmp_path / "a.ply", lambda: tiny.cloud)
    (tmp_path / "out" / name).mkdir(parents=True)
    with pytest.raises(UserError, match=f"{name}: is a folder; move it away"):
        write_result_folder(tmp_path / "out", results, scene, PlacementOptions())


@pytest.mark.parametrize("damage", ["", "[1, 2]", '{"matrix": [[1]]}', "another matrix"])
def test_a_damaged_transform_is_written_again(tmp_path, damage):
    tiny = make_tiny_scene(tmp_path / "scene", 4)
    write_gaussian_ply(tmp_path / "a.ply", tiny.cloud)
    scene = load_scene(tiny.root, size_rule=VanillaSize(-1), notify=pytest.fail)
    results = FinalResults(None, tmp_path / "a.ply", lambda: tiny.cloud)
    write_result_folder(tmp_path / "out", results, scene, PlacementOptions())
    path = tmp_path / "out" / "transform.json"
    whole = path.read_text()
    changed = {**json.loads(whole), "matrix": [[1, 2], "x"]}
    path.write_text(json.dumps(changed) if damage == "another matrix" else damage)
    write_result_folder(tmp_path / "out", results, scene, PlacementOptions())
    assert path.read_text() == whole
