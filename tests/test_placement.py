# SPDX-License-Identifier: Apache-2.0
"""The record of where a file stands: written, read back, of all versions, refused if damaged."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from scipy.spatial.transform import Rotation

from blender.sugar_scan.plain import placement as blender_placement
from blender.sugar_scan.plain.errors import ScanError
from gaussian_splatting.core.moved import GLB_AXES
from gaussian_splatting.formats import placement as placements
from gaussian_splatting.formats.placement import (
    METRE,
    TRANSFORM,
    UP,
    Origin,
    Placement,
    PlacementRecord,
)
from sugar_extractors.export.format_types import Axes
from sugar_extractors.export.formats import FORMATS, GAUSSIAN_FORMATS
from sugar_extractors.results import Capture, capture_of
from sugar_utils.errors import UserError

FAR = np.array([500_000.0, 4_000_000.0, 301.0])


def similarity(scale: float = 2.0, seed: int = 0) -> np.ndarray:
    matrix = np.eye(4)
    matrix[:3, :3] = scale * Rotation.random(random_state=seed).as_matrix()
    matrix[:3, 3] = (0.5, -1.0, 2.0)
    return matrix


def write(path: Path, values: object) -> Path:
    path.write_text(json.dumps(values))
    return path


def assert_same(placement: Placement, expected: Placement) -> None:
    np.testing.assert_allclose(placement.matrix, expected.matrix, atol=1e-9)
    np.testing.assert_array_equal(placement.offset, expected.offset)
    assert (placement.up, placement.unit, placement.map) == (
        expected.up,
        expected.unit,
        expected.map,
    )


@pytest.mark.parametrize("offset", [np.zeros(3), FAR], ids=["near", "far"])
def test_a_record_is_read_back(offset, tmp_path):
    origin = Origin(tmp_path / "a.pt", tmp_path / "scene", tmp_path / "vanilla", FAR)
    placement = Placement(similarity(), offset, UP, METRE, {"epsg": 32633}, origin)
    mesh = tmp_path / "out" / "mesh.glb"
    mesh.parent.mkdir()
    write(tmp_path / "out" / "mesh.glb.json", placement.record(mesh.parent))
    found = Placement.of(mesh)
    assert_same(found, placement)
    assert found.is_recorded
    assert found.is_metric
    for name in ("model", "scene", "checkpoint"):
        assert getattr(found.origin, name).resolve() == getattr(origin, name).resolve()
    # The folder may be moved with all that it is about.
    moved = tmp_path.with_name(f"{tmp_path.name}_moved")
    shutil.copytree(tmp_path, moved)
    scene = Placement.of(moved / "out" / "mesh.glb").origin.scene
    assert scene is not None
    assert scene.resolve() == (moved / "scene").resolve()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("mesh.obj", {"matrix": None}),
        ("a_placed.obj", None),
        ("a_placed_gaussians.ply", None),
        ("scan.glb", None),
    ],
)
def test_records_of_earlier_versions_are_read(name, content, tmp_path):
    matrix = similarity()
    old = {
        "mesh.obj": (
            TRANSFORM,
            {
                "matrix": matrix.tolist(),
                "matrix_to_scene": np.linalg.inv(matrix).tolist(),
                "glb_matrix": matrix.tolist(),
                "meaning": "file = matrix x (x, y, z, 1) of the scene; rows of 4",
                "up": "+y",
                "unit": None,
                "world_offset": [1.0, 2.0, 3.0],
                "model": "../a/450.pt",
                "sources": {"mesh": "0123456789abcdef"},
                "placement": {"orient": "up", "scale_factor": None, "known_distance": None},
                "lit": False,
            },
        ),
        "a_placed.obj": ("a_placed.json", {"matrix": matrix.tolist(), "up": "+y", "lit": True}),
        "a_placed_gaussians.ply": ("a_placed.json", {"matrix": matrix.tolist(), "up": "+y"}),
        "scan.glb": ("scan.glb.json", {"matrix": matrix.tolist(), "map": {"epsg": 32633}}),
    }
    record_name, values = old[name]
    write(tmp_path / record_name, values)
    (tmp_path / name).write_bytes(b"")
    placement = Placement.of(tmp_path / name)
    np.testing.assert_array_equal(placement.matrix, matrix)
    assert placement.is_recorded
    assert placement.scale == pytest.approx(2.0)


def test_full_coordinates_of_earlier_records_are_parted(tmp_path):
    """They wrote the whole translation and no offset."""
    matrix = similarity()
    matrix[:3, 3] = FAR
    write(tmp_path / "a.obj.json", {"matrix": matrix.tolist()})
    (tmp_path / "a.obj").write_bytes(b"")
    placement = Placement.of(tmp_path / "a.obj")
    np.testing.assert_array_equal(placement.offset, FAR)
    np.testing.assert_array_equal(placement.matrix[:3, 3], 0)


def test_records_that_lead_to_each_other_end(tmp_path):
    for name, other in (("a.ply", "b.ply"), ("b.ply", "a.ply")):
        (tmp_path / name).write_bytes(b"ply\nend_header\n")
        origin = Origin(model=tmp_path / other)
        write(tmp_path / f"{name}.json", Placement(similarity(), origin=origin).record(tmp_path))
    assert capture_of([tmp_path / "a.ply"]) == Capture()


def test_the_offset_of_another_selection_of_photographs_is_made_up_for():
    placement = Placement(np.eye(4), origin=Origin(world_offset=FAR))
    to_scene = placement.to_scene(FAR - [1, 0, -2])
    np.testing.assert_allclose(to_scene[:3, 3], (1, 0, -2))


def test_files_without_a_record_have_the_axes_of_their_format(tmp_path):
    for suffix in (".obj", ".ply", ".sog", ".splat", ".pt"):
        assert np.array_equal(Placement.of(tmp_path / f"a{suffix}").matrix, np.eye(4))
    for suffix in (".glb", ".spz", ".usdz"):
        assert np.array_equal(Placement.of(tmp_path / f"a{suffix}").matrix, GLB_AXES)


def test_the_formats_with_y_up_are_those_of_the_table():
    for entry in GAUSSIAN_FORMATS:
        for suffix in entry.read_suffixes:
            assert (suffix in placements.Y_UP_SUFFIXES) == (entry.axes is Axes.Y_UP)
    for entry in FORMATS.values():
        suffix = Path(f"a{entry.suffix}").suffix
        if entry.axes is Axes.Y_UP and suffix != ".html":
            assert suffix in placements.Y_UP_SUFFIXES


def test_tiles_have_the_record_of_their_tileset(tmp_path):
    placement = Placement(similarity(), up=UP)
    write(tmp_path / "tileset.json", {"root": {}, "extras": placement.record(tmp_path)})
    (tmp_path / "tile_00.glb").write_bytes(b"")
    assert_same(Placement.of(tmp_path / "tile_00.glb"), placement)
    assert_same(Placement.of(tmp_path / "tileset.json"), placement)


@pytest.mark.parametrize("suffix", [".obj", ".ply"])
def test_a_record_within_a_file_is_read(suffix, tmp_path):
    placement = Placement(similarity(), FAR, up=UP)
    line = placements.record_line(placement.record(tmp_path))
    text = f"# {line}\nv 0 0 0\n" if suffix == ".obj" else f"ply\ncomment {line}\nend_header\n"
    path = tmp_path / f"a{suffix}"
    path.write_text(text)
    assert_same(Placement.of(path), placement)
    path.write_text(text.replace("[[", "[["[:1]))
    with pytest.raises(UserError, match="damaged"):
        Placement.of(path)


@pytest.mark.parametrize(
    "matrix",
    [
        np.zeros((4, 4)).tolist(),
        np.diag([1e20, 1e20, 1e20, 1.0]).tolist(),
        [[1, 0, 0, 0]] * 3,
        [["a"] * 4] * 4,
        np.full((4, 4), 1e300).tolist(),
    ],
)
def test_a_matrix_that_leads_nowhere_is_refused_in_one_line(matrix, tmp_path):
    write(tmp_path / "a.ply.json", {"matrix": matrix})
    with pytest.raises(UserError) as error:
        Placement.of(tmp_path / "a.ply")
    assert "a.ply.json" in str(error.value)
    assert "\n" not in str(error.value)


def test_blender_reads_the_same_record(tmp_path):
    assert PlacementRecord.__struct_fields__ == blender_placement.KEYS
    assert (placements.TRANSFORM, placements.UP) == (
        blender_placement.TRANSFORM,
        blender_placement.UP,
    )
    origin = Origin(model=tmp_path / "a.pt")
    placement = Placement(similarity(), up=UP, unit=METRE, origin=origin)
    write(tmp_path / TRANSFORM, placement.record(tmp_path))
    found = blender_placement.Placement.of(tmp_path)
    np.testing.assert_array_equal(found.matrix, Placement.of(tmp_path).matrix)
    assert (found.up, found.unit) == (UP, METRE)
    assert found.model == tmp_path / "a.pt"


def changed(generator: random.Random, text: str) -> str:
    """A record that was cut, or in which something else stands somewhere."""
    kind = generator.randrange(4)
    if kind == 0:
        return text[: generator.randrange(len(text))]
    values = json.loads(text)
    name = generator.choice(list(values))
    strange = [None, [], {}, "", -1, 1e300, True, [[1e15] * 4] * 4, "../" * 50, "\udcff", [[0.0]]]
    if kind == 1:
        values.pop(name)
    elif kind == 2:
        values[name] = generator.choice(strange)
    else:
        rows = values["matrix"]
        rows[generator.randrange(4)][generator.randrange(4)] = generator.choice(strange)
    return json.dumps(values)


@pytest.mark.slow
def test_damaged_records_are_one_line_or_lead_somewhere(tmp_path):
    """2,000 records: cut, of other values, with huge numbers."""
    generator = random.Random(0)
    origin = Origin(tmp_path / "a.pt", tmp_path, tmp_path / "vanilla", FAR)
    record = Placement(similarity(), FAR, UP, METRE, {"epsg": 1}, origin).record(tmp_path)
    text = json.dumps({**record, "glb_matrix": similarity(seed=1).tolist()})
    (tmp_path / "mesh.glb").write_bytes(b"glTF")
    (tmp_path / "mesh.obj").write_bytes(b"")
    for number in range(2000):
        damaged = changed(generator, text)
        (tmp_path / TRANSFORM).write_text(damaged, errors="surrogatepass")
        name = ("mesh.glb", "mesh.obj", "splats.ply", ".")[number % 4]
        message = outcome_of(lambda path=tmp_path / name: check_usable(path))
        assert "\n" not in message, damaged
        assert "\n" not in outcome_of(lambda: blender_placement.Placement.of(tmp_path)), damaged


def check_usable(path: Path) -> None:
    placement = Placement.of(path)
    assert np.isfinite(placement.to_scene(FAR)).all()
    assert np.isfinite(placement.matrix).all()
    capture_of([path])


def outcome_of(call: Callable[[], object]) -> str:
    """The error that a user sees; empty where there is none."""
    try:
        call()
    except (UserError, ScanError) as error:
        return str(error)
    return ""
