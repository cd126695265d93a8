# SPDX-License-Identifier: Apache-2.0
"""Files keep the settings of rendering: antialiased, and where splats end."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from gaussian_splatting.core.cloud import ANTIALIASED, CUTOFF, NO_CUTOFF
from gaussian_splatting.core.moved import moved_cloud
from gaussian_splatting.engine.model import TrainableCloud, cloud_from_state
from gaussian_splatting.formats.ply import read_gaussian_ply, write_gaussian_ply
from gaussian_splatting.formats.sog import read_sog, write_sog
from gaussian_splatting.formats.spz import read_spz, write_spz
from gaussian_splatting.optim.schedule import LearningRates
from sugar_extractors.export.export_run import ExportOptions, export
from sugar_extractors.export.formats import GAUSSIANS
from sugar_extractors.export.gltf_gaussians import read_gltf_gaussians, write_gltf_gaussians
from sugar_extractors.export.usd.gaussians import read_usd_gaussians, write_usd_gaussians
from sugar_extractors.mesh.level_sets import build_model
from sugar_scene.bound_model import (
    TrainableBoundCloud,
    bound_cloud_from_state,
    state_with_background,
)
from sugar_scene.mesh_bound import bind_to_mesh
from sugar_utils.errors import UserError
from tests.support.heard_console import Heard
from tests.support.tiny_scene import tiny_cloud

FILES = {
    "ply": (write_gaussian_ply, read_gaussian_ply),
    "spz": (write_spz, read_spz),
    "spz4": (partial(write_spz, version=4), read_spz),
    "sog": (write_sog, read_sog),
    "glb": (write_gltf_gaussians, read_gltf_gaussians),
    "usd": (write_usd_gaussians, read_usd_gaussians),
}


def test_a_ply_keeps_where_splats_end(tmp_path):
    cloud = replace(tiny_cloud(20), antialiased=True, cutoff_deviations=2.1)
    write_gaussian_ply(tmp_path / "cloud.ply", cloud)
    assert read_gaussian_ply(tmp_path / "cloud.ply").rendering() == cloud.rendering()
    assert tiny_cloud(20).rendering() == {}


@pytest.mark.parametrize("word", ["-1", "nan", "wide", "2.5 px", ""])
def test_a_ply_with_another_word_there_ends_splats_as_3dgs(tmp_path, word):
    path = tmp_path / "cloud.ply"
    write_gaussian_ply(path, replace(tiny_cloud(20), cutoff_deviations=2.5))
    path.write_bytes(path.read_bytes().replace(b"deviations 2.5", b"deviations " + word.encode()))
    assert read_gaussian_ply(path).rendering() == {}


@pytest.mark.slow
@pytest.mark.parametrize("antialiased", [False, True])
@pytest.mark.parametrize("name", FILES)
def test_files_keep_it(tmp_path, name, antialiased):
    write, read = FILES[name]
    write(tmp_path / f"cloud.{name}", replace(tiny_cloud(20), antialiased=antialiased))
    assert read(tmp_path / f"cloud.{name}").antialiased is antialiased


def test_clouds_that_are_made_of_others_keep_it():
    cloud = replace(tiny_cloud(20), antialiased=True, cutoff_deviations=2.5)
    rendering = {"antialiased": True, "cutoff_deviations": 2.5}
    rows = torch.arange(5)
    turn = np.diag([2.0, -2.0, -2.0, 1.0])
    for made in (
        cloud.detached(),
        cloud.select(rows),
        cloud.joined(cloud),
        cloud.to("cpu"),
        moved_cloud(cloud, turn),
        TrainableCloud(cloud, LearningRates(), 1.0).cloud,
    ):
        assert made.rendering() == rendering
    opaque = replace(cloud, opacity_logits=cloud.opacity_logits.abs() + 1)
    assert build_model(opaque).gaussians.rendering() == rendering
    gaussians = cloud.activate()
    for made in (gaussians, gaussians.joined(gaussians), gaussians.as_leaves()):
        assert made.rendering() == rendering
    assert gaussians.without_bands().rendering() == rendering
    assert tiny_cloud(20).activate().rendering() == {}


@pytest.mark.parametrize("antialiased", [False, True])
def test_a_model_of_free_gaussians_keeps_it(antialiased):
    cloud = replace(tiny_cloud(6), antialiased=antialiased)
    payload = TrainableCloud(cloud, LearningRates(), 1.0).state()
    assert payload.get(ANTIALIASED, False) is antialiased
    assert ANTIALIASED not in payload["state_dict"]
    assert cloud_from_state(state_with_background(payload)).antialiased is antialiased


@pytest.mark.parametrize("cutoff", [NO_CUTOFF, 2.5])
def test_a_model_of_free_gaussians_keeps_where_splats_end(cutoff):
    cloud = replace(tiny_cloud(6), cutoff_deviations=cutoff)
    payload = TrainableCloud(cloud, LearningRates(), 1.0).state()
    assert payload.get(CUTOFF, NO_CUTOFF) == cutoff
    assert CUTOFF not in payload["state_dict"]
    state = state_with_background(payload)
    assert cloud_from_state(state).cutoff_deviations == cutoff


@pytest.mark.parametrize("cutoff", [-1.0, float("nan"), "2.5"])
def test_a_model_that_ends_splats_nowhere_is_refused(cutoff):
    payload = TrainableCloud(tiny_cloud(6), LearningRates(), 1.0).state()
    with pytest.raises(UserError, match="cutoff_deviations .* is no positive number"):
        cloud_from_state(state_with_background({**payload, CUTOFF: cutoff}))


def test_the_background_of_a_refined_model_has_no_cutoff(tmp_path):
    corners = torch.tensor([[0.0, 0, 0], [1, 0, 0], [0, 1, 0]])
    cloud = bind_to_mesh(corners, torch.tensor([[0, 1, 2]]), torch.full((3, 3), 0.5), 3, 1.0)
    free = replace(tiny_cloud(4), cutoff_deviations=2.5)
    model = TrainableBoundCloud(replace(cloud, background=free), LearningRates(), 1.0)
    assert model.cloud.background.rendering() == model.activate().rendering() == {}


@pytest.mark.slow
@pytest.mark.parametrize("name", GAUSSIANS)
@pytest.mark.parametrize("cutoff", [NO_CUTOFF, 2.5])
def test_an_export_of_splats_that_end_says_so_in_a_line(tmp_path, name, cutoff):
    write_gaussian_ply(tmp_path / "in.ply", replace(tiny_cloud(20), cutoff_deviations=cutoff))
    console = Heard()
    export(ExportOptions(tmp_path / "in.ply", name, tmp_path / "out"), console)
    notes = [line for line in console.lines if "end at 2.5 standard deviations" in line]
    assert len(notes) == (cutoff == 2.5)


@pytest.mark.slow
@pytest.mark.parametrize("name", GAUSSIANS)
@pytest.mark.parametrize("antialiased", [False, True])
def test_formats_without_a_word_for_it_are_said_in_a_line(tmp_path, name, antialiased):
    write_gaussian_ply(tmp_path / "in.ply", replace(tiny_cloud(20), antialiased=antialiased))
    console = Heard()
    export(ExportOptions(tmp_path / "in.ply", name, tmp_path / "out"), console)
    notes = [line for line in console.lines if "antialiased" in line]
    assert len(notes) == (antialiased and name in ("splat", "ply", "gltf", "usd"))


@pytest.mark.parametrize("antialiased", [False, True])
def test_a_refined_model_keeps_it_beside_what_other_readers_read(antialiased):
    corners = torch.tensor([[0.0, 0, 0], [1, 0, 0], [0, 1, 0]])
    cloud = bind_to_mesh(corners, torch.tensor([[0, 1, 2]]), torch.full((3, 3), 0.5), 3, 1.0)
    start = replace(cloud, antialiased=antialiased, background=tiny_cloud(4))
    payload = TrainableBoundCloud(start, LearningRates(), 1.0).state()
    assert payload.get(ANTIALIASED, False) is antialiased
    assert ANTIALIASED not in payload["state_dict"]
    found = bound_cloud_from_state(state_with_background(payload)).to("cpu")
    assert found.antialiased is antialiased
    assert found.activate_all().antialiased is antialiased
    assert found.to_gaussians().antialiased is antialiased
    assert found.background.antialiased is antialiased
