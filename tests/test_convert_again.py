# SPDX-License-Identifier: Apache-2.0
"""Results of an earlier conversion are used again only for what they were made of."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pycolmap
import pytest
from PIL import Image

from gaussian_splatting.data.colmap import write_model
from sugar_capture import scene_folder
from sugar_capture.conversion.convert_run import convert
from sugar_capture.convert_options import ConvertOptions, SfmOptions
from sugar_capture.features import matching
from sugar_capture.features.feature_database import database_errors
from sugar_capture.features.matching import verified_matches
from sugar_capture.pairs.pair_checks import contradicting_pairs
from sugar_capture.registration import mapping
from sugar_capture.scene_folder import needs_cameras
from sugar_utils.console import Console
from sugar_utils.errors import UserError
from tests.support.limits import largest_file
from tests.support.photographed_room import HEIGHT, WIDTH, write_photographs

N = 5
SMALL = SfmOptions(extraction_size=WIDTH, max_features=500)

FULL_AT = (50_000, 200_000, 500_000)
"""Sizes that the database reaches while features are written, at their end, and with matches."""


@pytest.fixture(scope="module")
def converted(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("room")
    write_photographs(root / "input", N)
    convert(ConvertOptions(root, sfm=SMALL), Console.silent())
    return root


@pytest.mark.slow
def test_cameras_are_needed_again_once_photographs_or_masks_change(converted, tmp_path):
    root = tmp_path / "scene"
    shutil.copytree(converted, root)
    assert not needs_cameras(root)
    added = root / "input" / f"IMG {N + 1}.png"
    shutil.copy(root / "input" / f"IMG {N}.png", added)
    assert needs_cameras(root)
    added.unlink()
    assert not needs_cameras(root)
    Image.new("L", (WIDTH, HEIGHT), 255).save(_made(root / "input_masks") / "IMG 1.png")
    assert needs_cameras(root)
    convert(ConvertOptions(root, sfm=SMALL), Console.silent())
    assert not needs_cameras(root)
    # Flat copies are no photographs to begin with.
    shutil.rmtree(root / "input")
    assert not needs_cameras(root)


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def test_flat_copies_of_another_lens_are_not_kept_after_a_kill(converted, tmp_path, monkeypatch):
    root = tmp_path / "scene"
    shutil.copytree(converted / "input", root / "input")
    shutil.copytree(converted / "distorted" / "sparse", root / "distorted" / "sparse")
    options = ConvertOptions(root, skip_matching=True)
    monkeypatch.setattr(scene_folder, "write_flat_model", _interrupted)
    with pytest.raises(KeyboardInterrupt):
        convert(options, Console.silent())
    monkeypatch.undo()
    folder = root / "distorted" / "sparse" / "0"
    model = pycolmap.Reconstruction(str(folder))
    for lens in model.cameras.values():
        lens.params = [*lens.params[:3], lens.params[3] + 0.2]
    model.write_binary(str(folder))
    convert(options, Console.silent())
    lenses = pycolmap.Reconstruction(str(root / "sparse" / "0")).cameras.values()
    sizes = {(lens.width, lens.height) for lens in lenses}
    for path in (root / "images").iterdir():
        with Image.open(path) as picture:
            assert picture.size in sizes
    # Finished, but not for another model.
    shutil.rmtree(folder)
    shutil.copytree(converted / "distorted" / "sparse" / "0", folder)
    convert(options, Console.silent())
    assert_same_model(root, converted)


def test_models_that_are_damaged_or_of_other_sizes_are_refused(converted, tmp_path):
    root = tmp_path / "scene"
    shutil.copytree(converted / "input", root / "input")
    shutil.copytree(converted / "distorted" / "sparse", root / "distorted" / "sparse")
    options = ConvertOptions(root, skip_matching=True)
    folder = root / "distorted" / "sparse" / "0"
    model = pycolmap.Reconstruction(str(folder))
    for lens in model.cameras.values():
        lens.rescale(2.0)
    model.write_binary(str(folder))
    with pytest.raises(UserError, match=f"of {2 * WIDTH} x {2 * HEIGHT} px, but .* is {WIDTH} x"):
        convert(options, Console.silent())
    cameras = folder / "cameras.bin"
    cameras.write_bytes(cameras.read_bytes()[:-3])
    with pytest.raises(UserError, match="cameras.bin: truncated"):
        convert(options, Console.silent())
    assert not (root / "images").exists()


def test_a_damaged_model_of_an_earlier_call_is_made_again(converted, tmp_path):
    root = tmp_path / "scene"
    shutil.copytree(converted, root)
    record = root / "distorted" / "convert.json"
    noted = json.loads(record.read_text(encoding="utf-8"))
    record.write_text(json.dumps({**noted, "finished": ""}), encoding="utf-8")
    images = root / "distorted" / "sparse" / "0" / "images.bin"
    images.write_bytes(images.read_bytes()[:-3])
    convert(ConvertOptions(root, sfm=SMALL), Console.silent())
    assert_same_model(root, converted)


def test_matches_of_features_that_are_not_there_are_a_damaged_database(converted, tmp_path):
    path = tmp_path / "database.db"
    shutil.copy(converted / "distorted" / "database.db", path)
    with pycolmap.Database.open(str(path)) as database:
        geometry = database.read_two_view_geometry(1, 2)
        rows = geometry.inlier_matches.copy()
        rows[0, 0] = 1 << 29
        geometry.inlier_matches = rows
        database.update_two_view_geometry(1, 2, geometry)
    model = pycolmap.Reconstruction(str(converted / "distorted" / "sparse" / "0"))
    names = [f"IMG {k}.png" for k in range(1, N + 1)]
    with pytest.raises(UserError, match=r"database\.db: damaged, the matches of IMG 1\.png and"):
        contradicting_pairs(model, path, names, verified_matches(path))


def test_errors_of_the_database_are_told_from_our_own(tmp_path):
    path = tmp_path / "database.db"
    with (
        pytest.raises(UserError, match="cannot go on with .*remove the file"),
        database_errors(path),
    ):
        raise ValueError("[types.cc:48] Check failed: scale >= 0.0 (-3 vs. 0)")
    with pytest.raises(ValueError, match="^ours$"), database_errors(path):
        raise ValueError("ours")


@pytest.mark.skipif(sys.platform == "win32", reason="no limit of the size of files")
def test_a_model_that_is_cut_off_while_it_is_written_is_an_error(converted, tmp_path):
    model = pycolmap.Reconstruction(str(converted / "sparse" / "0"))
    with largest_file(20_000), pytest.raises(UserError, match=r"cannot write .*cut off; free some"):
        write_model(model, tmp_path / "0")
    write_model(model, tmp_path / "0")
    for path in (converted / "sparse" / "0").iterdir():
        assert (tmp_path / "0" / path.name).read_bytes() == path.read_bytes()


def assert_same_model(root: Path, expected: Path) -> None:
    for path in (expected / "sparse" / "0").iterdir():
        assert (root / "sparse" / "0" / path.name).read_bytes() == path.read_bytes()


@pytest.mark.skipif(sys.platform == "win32", reason="no such limits on Windows")
@pytest.mark.parametrize(
    "n_bytes", [pytest.param(n, marks=[pytest.mark.slow] * (n != 50_000)) for n in FULL_AT]
)
def test_a_full_disk_is_one_line_and_the_same_command_goes_on(converted, tmp_path, n_bytes):
    shutil.copytree(converted / "input", tmp_path / "input")
    options = ConvertOptions(tmp_path, sfm=SMALL)
    with largest_file(n_bytes), pytest.raises(UserError, match=r"database\.db.*free some space"):
        convert(options, Console.silent())
    convert(options, Console.silent())
    assert_same_model(tmp_path, converted)


@pytest.mark.parametrize(
    ("damage", "steps"),
    [
        pytest.param("text", "match_pairs", marks=pytest.mark.slow),
        pytest.param("middle", "match_pairs", marks=pytest.mark.slow),
        pytest.param("half", "map_photographs", marks=pytest.mark.slow),
        ("empty", "map_photographs"),
        ("text", "all"),
    ],
)
def test_a_damaged_database_is_made_anew(converted, tmp_path, monkeypatch, damage, steps):
    shutil.copytree(converted, tmp_path / "scene")
    root = tmp_path / "scene"
    options = ConvertOptions(root, resize=True, sfm=SMALL)
    if steps != "all":
        shutil.rmtree(root / "distorted")
        place = matching if steps == "match_pairs" else mapping
        monkeypatch.setattr(place, steps, _interrupted)
        with pytest.raises(KeyboardInterrupt):
            convert(replace(options, overwrite=True), Console.silent())
        monkeypatch.undo()
    path = root / "distorted" / "database.db"
    whole = path.read_bytes()
    middle = len(whole) // 2
    path.write_bytes(
        {
            "text": b"hello" * 100,
            "half": whole[:middle],
            "empty": b"",
            "middle": whole[:middle] + b"\xa5" * 9000 + whole[middle + 9000 :],
        }[damage]
    )
    convert(replace(options, overwrite=True), Console.silent())
    assert_same_model(root, converted)


def _interrupted(*_: object) -> None:
    raise KeyboardInterrupt
