# SPDX-License-Identifier: Apache-2.0
"""Streamed SOG: the index leads to all Gaussians, and coarser levels look like the finest."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from gaussian_splatting.core.cloud import GaussianCloud
from gaussian_splatting.formats import streamed_sog
from gaussian_splatting.formats.fidelity import fidelity
from gaussian_splatting.formats.merging import merged_gaussians
from gaussian_splatting.formats.packing import columns, sigmoid
from gaussian_splatting.formats.ply import read_gaussian_ply, write_gaussian_ply
from gaussian_splatting.formats.sog import read_sog_folder, sog_files
from gaussian_splatting.formats.streamed_sog import read_streamed_sog, write_streamed_sog
from gaussian_splatting.rasterization.render import render_view
from tests.support.random_scenes import look_at
from tests.support.tiny_scene import refusal, run_cli
from tests.support.verbs import export

N_GAUSSIANS = 700


def surface(n: int) -> GaussianCloud:
    """Flat opaque Gaussians on a ball, in smooth colours."""
    drawn = torch.Generator().manual_seed(1)
    means = torch.nn.functional.normalize(torch.randn(n, 3, generator=drawn), dim=1)
    # A turn of the z axis to the normal.
    quats = torch.cat([1 + means[:, 2:], -means[:, 1:2], means[:, :1], torch.zeros(n, 1)], dim=1)
    width = 2 / n**0.5
    scales = torch.tensor([width, width, 0.1 * width]).log().expand(n, 3)
    rest = 0.1 * torch.sin(means.repeat(1, 15).reshape(n, 15, 3))
    return GaussianCloud(
        means=means,
        sh_dc=torch.sin(2 * means)[:, None],
        sh_rest=rest,
        opacity_logits=torch.full((n, 1), 2.0),
        log_scales=scales.contiguous(),
        quats=quats,
    )


@pytest.fixture(scope="module")
def cloud() -> GaussianCloud:
    return surface(N_GAUSSIANS)


@pytest.fixture
def small_chunks(monkeypatch):
    """Sizes at which a small cloud has several leaves, folders and levels."""
    monkeypatch.setattr(streamed_sog, "_LEAF_ROWS", 100)
    monkeypatch.setattr(streamed_sog, "_CHUNK_ROWS", 300)
    monkeypatch.setattr(streamed_sog, "_LEAST_LEVEL", 40)


def leaves_of(node: dict) -> list[dict]:
    if "lods" in node:
        return [node]
    return [leaf for child in node["children"] for leaf in leaves_of(child)]


def test_the_leaves_share_out_all_rows_of_all_files(cloud, small_chunks, tmp_path):
    order = write_streamed_sog(tmp_path / "lod-meta.json", cloud)
    assert sorted(order) == list(range(N_GAUSSIANS))
    index = json.loads((tmp_path / "lod-meta.json").read_text())
    assert (index["version"], index["lodLevels"]) == (1, 3)
    assert index["counts"][0] == N_GAUSSIANS
    assert index["count"] == sum(index["counts"])
    leaves = leaves_of(index["tree"])
    assert len(leaves) == 8
    for number, name in enumerate(index["filenames"]):
        level = name.split("_")[0]
        places = [leaf["lods"][level] for leaf in leaves if leaf["lods"][level]["file"] == number]
        # Rows follow each other without gaps up to the end of the file.
        ends = np.cumsum([place["count"] for place in places])
        assert [place["offset"] for place in places] == [0, *ends[:-1]]
        assert len(read_sog_folder(tmp_path / name)) == ends[-1] <= 300
    for level, count in enumerate(index["counts"]):
        assert sum(leaf["lods"][str(level)]["count"] for leaf in leaves) == count


def test_boxes_hold_the_gaussians_of_their_leaf_in_every_level(cloud, small_chunks, tmp_path):
    write_streamed_sog(tmp_path / "lod-meta.json", cloud)
    index = json.loads((tmp_path / "lod-meta.json").read_text())
    root = index["tree"]["bound"]
    for leaf in leaves_of(index["tree"]):
        bound = leaf["bound"]
        assert np.all(np.array(root["min"]) <= bound["min"])
        assert np.all(np.array(root["max"]) >= bound["max"])
        for place in leaf["lods"].values():
            part = read_sog_folder(tmp_path / index["filenames"][place["file"]])
            means = part.means[place["offset"] : place["offset"] + place["count"]].numpy()
            assert (means >= np.array(bound["min"])).all()
            assert (means <= np.array(bound["max"])).all()


def test_what_is_read_back_is_what_sog_holds(cloud, small_chunks, tmp_path):
    order = write_streamed_sog(tmp_path / "lod-meta.json", cloud)
    read = read_streamed_sog(tmp_path / "lod-meta.json")
    errors = fidelity(cloud.select(torch.from_numpy(order)), read)
    assert errors.position < 1e-4
    assert errors.rotation < 1


def test_an_index_with_other_names_and_an_environment_is_read(cloud, tmp_path):
    parts = {"detail": cloud.select(torch.arange(300)), "sky": cloud.select(torch.arange(300, 350))}
    for name, part in parts.items():
        (tmp_path / name).mkdir()
        for file, content in sog_files(part).items():
            (tmp_path / name / file).write_bytes(content)
    leaf = {"bound": {"min": [-1] * 3, "max": [1] * 3}}
    leaf["lods"] = {
        "1": {"file": 0, "offset": 0, "count": 5},
        "0": {"file": 0, "offset": 100, "count": 200},
    }
    index = {
        "lodLevels": 2,
        "environment": "sky/meta.json",
        "filenames": ["detail/meta.json"],
        "tree": leaf,
    }
    (tmp_path / "lod-meta.json").write_text(json.dumps(index))
    read = read_streamed_sog(tmp_path / "lod-meta.json")
    expected = cloud.select(torch.arange(100, 350))
    assert fidelity(expected, read).position < 1e-4
    assert len(read_streamed_sog(tmp_path / "sky" / "meta.json")) == 50


def test_merged_gaussians_look_like_those_that_they_stand_for():
    merged = merged_gaussians(surface(4000), 4)
    assert len(merged) == 1000
    view = look_at((2.0, -1.5, 1.0), width=60, height=60, focal=60.0)

    def picture(part: GaussianCloud) -> torch.Tensor:
        gaussians = part.activate(graph=False)
        return render_view(gaussians, view, white=False, geometry=False).image

    with torch.no_grad():
        expected = picture(surface(4000))
        error = ((picture(merged) - expected) ** 2).mean()
        every_fourth = surface(4000).select(torch.arange(0, 4000, 4))
        error_of_some = ((picture(every_fourth) - expected) ** 2).mean()
    assert -10 * float(error.log10()) > 26
    assert error < 0.1 * error_of_some


def test_gaussians_that_are_equal_merge_into_one_like_them(cloud):
    one = cloud.select(torch.tensor([5]))
    four = cloud.select(torch.tensor([5, 5, 5, 5]))
    merged = merged_gaussians(four, 4)
    assert fidelity(one, merged).position < 1e-6
    np.testing.assert_allclose(np.sort(merged.log_scales), np.sort(one.log_scales), atol=1e-4)
    # Four on one place cover more than one does.
    assert sigmoid(columns(merged)["opacity_logits"]) > 0.99


@pytest.fixture
def source(cloud, tmp_path) -> Path:
    write_gaussian_ply(tmp_path / "a.ply", cloud)
    return tmp_path / "a.ply"


def test_a_new_export_leaves_nothing_of_the_one_that_it_replaces(source, tmp_path, capsys):
    words = ("--to", "sog_lod", "-o", tmp_path / "scene")
    assert run_cli(export.main, source, *words) == 0
    (tmp_path / "scene" / "notes").mkdir()
    assert "lod-meta.json: is there already" in refusal(capsys, export.main, source, *words)
    assert run_cli(export.main, source, *words, "--overwrite", "True") == 0
    names = sorted(path.name for path in (tmp_path / "scene").iterdir())
    assert names == ["0_0_1", "lod-meta.json", "notes"]
    again = tmp_path / "again.ply"
    index = tmp_path / "scene" / "lod-meta.json"
    assert run_cli(export.main, index, "--to", "ply", "-o", again) == 0
    assert len(read_gaussian_ply(again, lambda _: None)) == N_GAUSSIANS


def test_an_export_that_fails_leaves_the_earlier_one(source, cloud, tmp_path, monkeypatch):
    index = tmp_path / "lod-meta.json"
    write_streamed_sog(index, cloud)
    before = sorted(tmp_path.iterdir())

    def fail(part: GaussianCloud) -> dict[str, bytes]:
        raise OSError("no space")

    monkeypatch.setattr(streamed_sog, "sog_files", fail)
    with pytest.raises(OSError, match="no space"):
        write_streamed_sog(index, cloud)
    assert sorted(tmp_path.iterdir()) == before
    assert len(read_streamed_sog(index)) == N_GAUSSIANS


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"version": 2}, "version 2"),
        ({"filenames": ["../0_0/meta.json"]}, "outside of its folder"),
        ({"filenames": []}, "no file 0"),
        ({"filenames": ["0_7/meta.json"]}, "0_7"),
        ({"tree": 3}, "damaged"),
        ({"tree": {"lods": {"0": {"file": 0, "offset": 0, "count": 10**6}}}}, "no rows"),
        ({"tree": {}}, "holds no Gaussians"),
    ],
)
def test_a_damaged_index_is_one_line(change, part, cloud, tmp_path, capsys):
    index = tmp_path / "lod-meta.json"
    write_streamed_sog(index, cloud)
    index.write_text(json.dumps({**json.loads(index.read_text()), **change}))
    error = refusal(capsys, export.main, index, "--to", "ply", "-o", tmp_path / "a.ply")
    assert part in error


def test_splat_transform_reads_the_finest_level(cloud, small_chunks, tmp_path):
    program = shutil.which("splat-transform")
    if program is None:
        pytest.skip("needs PlayCanvas' splat-transform")
    write_streamed_sog(tmp_path / "lod-meta.json", cloud)
    words = ["-g", "cpu", tmp_path / "lod-meta.json", "-L", "0", tmp_path / "b.ply"]
    subprocess.run([program, *map(str, words)], check=True, capture_output=True)
    theirs = read_gaussian_ply(tmp_path / "b.ply", lambda _: None)
    assert fidelity(read_streamed_sog(tmp_path / "lod-meta.json"), theirs).position < 1e-6
