# SPDX-License-Identifier: Apache-2.0
"""Highlights that ``benchmarks/glossy_scene.py`` adds to photographs."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

from benchmarks.glossy_scene import LIGHT, STRENGTH, highlights, parse, run, with_light
from sugar_scene.triangle_mesh import with_vertex_normals
from sugar_utils.errors import UserError
from tests.support.mesh_scenes import sphere
from tests.support.random_scenes import look_at


@pytest.mark.parametrize("eye", [(3.0, 0.0, 1.0), (0.0, 3.0, 1.0)])
def test_a_highlight_lies_where_the_normal_is_between_light_and_eye(eye):
    mesh = with_vertex_normals(sphere(rings=80))
    camera = look_at(eye, width=160, height=160, focal=350.0)
    added = highlights(mesh, camera)
    assert float(added.max()) == pytest.approx(STRENGTH, rel=0.02)
    row, column = divmod(int(added.argmax()), camera.width)
    light = np.array(LIGHT) / np.linalg.norm(LIGHT)
    # Far away: the line of sight is the same everywhere on the sphere, nearly.
    halfway = light + np.array(eye) / np.linalg.norm(eye)
    place = camera.rotation @ (0.5 * halfway / np.linalg.norm(halfway)) + camera.translation
    assert column + 0.5 == pytest.approx(camera.fx * place[0] / place[2] + camera.cx, abs=4)
    assert row + 0.5 == pytest.approx(camera.fy * place[1] / place[2] + camera.cy, abs=4)
    assert float((added > 0.5 * STRENGTH).float().mean()) < 0.05
    assert float(added[0].max()) == 0


def test_photographs_become_brighter_where_light_is_added_alone(tmp_path):
    before = np.random.default_rng(0).integers(0, 256, (8, 8, 3)).astype(np.uint8)
    Image.fromarray(before).save(tmp_path / "view.png")
    added = torch.zeros(8, 8)
    added[2:4] = 0.3
    after = np.asarray(with_light(tmp_path / "view.png", added.numpy()))
    is_lit = added.numpy() > 0
    assert np.array_equal(after[~is_lit], before[~is_lit])
    dark = before[is_lit] < 128
    assert bool((after[is_lit][dark] > before[is_lit][dark]).all())
    assert bool((after[is_lit] >= before[is_lit]).all())


def test_a_scene_without_its_mesh_is_refused(tmp_path):
    with pytest.raises(UserError, match="no gt_object.ply"):
        run(parse([str(tmp_path / "copy"), "--scene", str(tmp_path)]))
    assert not (tmp_path / "copy").exists()
    with pytest.raises(UserError, match="exists"):
        run(parse([str(tmp_path), "--scene", str(tmp_path)]))
