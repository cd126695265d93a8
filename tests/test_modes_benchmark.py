# SPDX-License-Identifier: Apache-2.0
"""The table of all modes, on a sphere that is known exactly."""

from __future__ import annotations

import json

import pytest

from benchmarks import modes
from tests.support.mesh_scenes import sphere
from tests.support.tiny_scene import SHORT_PIPELINE, make_tiny_checkpoint, make_tiny_scene
from tests.test_mesh_quality import write_scene


def test_flags_of_the_pipeline_stand_behind_two_dashes():
    assert modes.split_command(["a", "--", "-r", "sdf", "--", "b"]) == (
        ["a"],
        ["-r", "sdf", "--", "b"],
    )
    assert modes.split_command(["a", "b"]) == (["a", "b"], [])


@pytest.mark.slow
@pytest.mark.usefixtures("small_pictures")
def test_every_mode_starts_from_one_checkpoint_and_is_measured(tmp_path, capsys):
    scene = make_tiny_scene(tmp_path / "scene")
    write_scene(scene.root, sphere(1.0))
    checkpoint = make_tiny_checkpoint(tmp_path / "vanilla", scene)
    flags = ["--gs_output_dir", str(checkpoint), *map(str, SHORT_PIPELINE)]
    args = modes.parser().parse_args([str(scene.root), "--output", str(tmp_path / "out")])
    modes.run(args, flags)
    stored = json.loads((tmp_path / "out" / modes.RESULT_FILE).read_text())["scenes"]["scene"]
    assert set(stored) == set(modes.MODES)
    for figures in stored.values():
        # A handful of iterations from the truth.
        assert 0 < figures["chamfer"] < 0.2
    shown = capsys.readouterr().out
    assert "[4] multiview" in shown
    assert "seconds of the stages" in shown
