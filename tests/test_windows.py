# SPDX-License-Identifier: Apache-2.0
"""Paths and names as Windows has them, and constructs that only work elsewhere."""

from __future__ import annotations

import ntpath
import os
import re
import subprocess
import sys
from pathlib import Path, PureWindowsPath

import pytest

from gaussian_splatting.engine.run_directory import RunDirectory
from sugar_extractors.mesh.mesh_config import mesh_name
from sugar_pipeline.pipeline.plan import plan_of
from sugar_trainers.naming import coarse_name, refined_name, scene_name
from sugar_utils.errors import UserError
from sugar_utils.html import Link
from sugar_utils.recipe import Recipe
from tests.support.command_words import full_flags
from tests.support.repository import (
    name_of,
    production_files,
)

LONGEST = 260
"""Characters of a path that Windows takes without being told to."""

RESERVED = re.compile(r'[<>:"/\\|?*\x00-\x1f]|[. ]$|^(con|prn|aux|nul|com\d|lpt\d)(\.|$)', re.I)


class WindowsPath(PureWindowsPath):
    """A path on a Windows machine where nothing exists yet."""

    def resolve(self) -> WindowsPath:
        return self if self.is_absolute() else WindowsPath(r"C:\work") / self

    def is_file(self) -> bool:
        return False

    def is_dir(self) -> bool:
        return False


def windows_plan(scene: str, output: str, *flags: str):
    """The plan of all stages for paths on Windows."""
    words = ["-s", scene, "-r", "dn_consistency", "--output_dir", output, "--device", "cpu", *flags]
    flags = full_flags(*words)
    paths = {
        name: WindowsPath(str(value)) for name, value in flags.items() if isinstance(value, Path)
    }
    return plan_of(flags.replaced(**paths))


def results_of(plan) -> dict[str, PureWindowsPath]:
    return {
        "vanilla": plan.vanilla.model_path,
        "coarse": plan.coarse.result,
        "mesh": plan.mesh.mesh_paths[0],
        "refined": plan.refine.result,
        "ply": plan.refine.ply_path,
        "texture": plan.texture.obj_path,
    }


@pytest.mark.parametrize(
    ("scene", "name"),
    [
        ("D:\\scans\\Cup", "Cup"),
        ("D:/scans/Cup/", "Cup"),
        ("scans\\My Cup", "My Cup"),
        ("\\\\server\\share\\scans\\Cup", "Cup"),
        (".", "work"),
        ("D:\\", "scene"),
    ],
)
def test_all_stages_write_below_the_output_folder(scene, name):
    output = WindowsPath(r"E:\results of today")
    results = results_of(windows_plan(scene, str(output)))
    coarse = "sugarcoarse_3Dgs7000_densityestim02_sdfnorm02"
    assert results["vanilla"] == output / "vanilla_gs" / name
    assert results["coarse"] == output / "coarse" / name / coarse / "15000.pt"
    assert results["mesh"].parent == output / "coarse_mesh" / name
    assert results["refined"].parent.parent == output / "refined" / name
    assert results["texture"].parent == output / "refined_mesh" / name
    for path in results.values():
        assert path.drive == "E:"
        assert len(str(path)) < LONGEST


def test_results_differ_also_without_regard_to_case():
    paths = [str(path).lower() for path in results_of(windows_plan("Cup", "out")).values()]
    assert len(set(paths)) == len(paths)


def test_a_stage_reads_what_the_one_before_wrote():
    plan = windows_plan("D:\\scans\\Cup", "E:\\out")
    assert plan.coarse.checkpoint_path == plan.vanilla.model_path
    assert plan.mesh.coarse_model_path == plan.coarse.result
    assert plan.refine.mesh_path == plan.mesh.mesh_paths[0]
    assert plan.texture.refined_model_path == plan.refine.result


def test_identities_are_text():
    options = windows_plan("D:\\scans\\Cup", "E:\\out").coarse
    assert Recipe(options.identity(), sources=options.sources()).sources == {
        "scene": "D:\\scans\\Cup",
        "checkpoint": "E:\\out\\vanilla_gs\\Cup",
    }


@pytest.mark.parametrize("value", [0.2, 1.0, 1e-5, 0.30000000000000004, 1e22])
def test_names_of_ours_are_allowed_on_windows(value):
    parent = WindowsPath("out")
    for regularization in ("sdf", "density", "dn_consistency"):
        coarse = coarse_name(7000, regularization, value, value)
        for variant in ("", "tsdf", "poissoncenters", "marchingcubes"):
            mesh = mesh_name(coarse, value, 200_000, variant)
            for name in (coarse, mesh, refined_name(parent / mesh, value, 6)):
                assert not RESERVED.search(name), name


def test_the_name_of_a_scene_is_its_last_component():
    assert scene_name(WindowsPath("D:\\scans\\Cup\\")) == "Cup"
    assert scene_name(WindowsPath("D:\\scans\\Cup\\.")) == "Cup"
    assert scene_name(Path("/")) == "scene"


def test_a_relative_scene_is_called_by_its_real_folder(tmp_path, monkeypatch):
    below = tmp_path / "Cup" / "images"
    below.mkdir(parents=True)
    monkeypatch.chdir(below)
    for text in ("..", "../", "../.", "../images/..", "../../Cup", "../../Cup/", "../../Cup/."):
        assert scene_name(Path(text)) == "Cup", text
    for text in ("", ".", "./", "../images"):
        assert scene_name(Path(text)) == "images", text
    assert scene_name(Path("../" * 50)) == "scene"


def test_a_page_does_not_link_to_another_drive(monkeypatch):
    monkeypatch.setattr("sugar_utils.html.os.path", ntpath)
    link = Link.to(WindowsPath("D:\\a\\mesh.obj"), WindowsPath("C:\\out"))
    assert link == Link("D:\\a\\mesh.obj")


def test_a_file_that_another_program_holds_open_is_named(tmp_path, monkeypatch):
    RunDirectory(tmp_path, Recipe({"a": 1})).record("finished", timings={})
    for iteration in (5, 10):
        (tmp_path / f"{iteration}.pt").write_bytes(b"")

    unlink = Path.unlink

    def refuse(self, missing_ok=False):
        if self.suffix == ".pt":
            raise PermissionError(13, "The process cannot access the file", str(self))
        unlink(self, missing_ok)

    monkeypatch.setattr(Path, "unlink", refuse)
    run = RunDirectory(tmp_path, Recipe({"a": 2}))
    assert run.plan("none", True, 20, print).payload is None
    with pytest.raises(UserError, match=r"cannot remove .*10\.pt.*close the program"):
        run.replace_other(tmp_path / "5.pt")
    # The new run is in the folder, and the next start of it removes what is left of the old one.
    monkeypatch.undo()
    again = RunDirectory(tmp_path, Recipe({"a": 2}))
    with pytest.raises(UserError, match=r"5\.pt: the checkpoint is damaged"):
        again.plan(str(tmp_path / "5.pt"), False, 20, print)
    assert not (tmp_path / "10.pt").exists()


def test_characters_that_the_output_lacks_are_spelled():
    code = (
        "import sys\n"
        "from sugar_utils.entrypoint import run_main; from sugar_utils.errors import *\n"
        "def main():\n    print('Stra\\u00dfe \\u2192'); raise UserError('\\u4e2d')\n"
        "sys.exit(run_main(main))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        env={
            **os.environ,
            "PYTHONIOENCODING": "cp1252:strict",
            "PYTHONPATH": str(Path(__file__).parent.parent),
        },
    )
    assert done.returncode == 2
    assert done.stdout.split(b"\n")[0].rstrip() == b"Stra\xdfe \\u2192"
    assert done.stderr.rstrip() == b"error: \\u4e2d"


def test_files_of_the_repository_have_names_that_windows_takes():
    names = [name_of(path) for path in production_files()]
    assert len({name.lower() for name in names}) == len(names)
    assert not [part for name in names for part in name.split("/") if RESERVED.search(part)]
