# SPDX-License-Identifier: Apache-2.0
"""Photographs become a scene with cameras: right, resumable, and said in words when they cannot."""

from __future__ import annotations

import itertools
import json
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pycolmap
import pytest
from PIL import Image, ImageFilter

from gaussian_splatting.data.cameras import Camera
from gaussian_splatting.data.colmap import read_reconstruction
from gaussian_splatting.data.masks import MaskOptions
from gaussian_splatting.scenes.scene import load_scene
from sugar_capture import scene_folder
from sugar_capture.conversion.convert_run import convert
from sugar_capture.convert_options import (
    ConvertOptions,
    SfmOptions,
)
from sugar_capture.features import matching
from sugar_capture.features.feature_database import create_database
from sugar_capture.features.matching import extract_features, verified_matches
from sugar_capture.features.photographs import (
    described_photographs,
)
from sugar_capture.pairs import pair_checks
from sugar_capture.pairs.pair_checks import contradicting_pairs
from sugar_capture.registration import mapping, plain_steps
from sugar_capture.scene_folder import needs_cameras
from sugar_utils.errors import UserError
from tests.support.command_words import parse
from tests.support.heard_console import Heard
from tests.support.photographed_room import (
    FOCAL,
    HEIGHT,
    WIDTH,
    camera_poses,
    model_bytes,
    photograph,
    write_photographs,
)
from tests.support.pose_errors import pose_errors
from tests.support.tiny_scene import finish, start

N = 6
SMALL = SfmOptions(extraction_size=WIDTH, max_features=600)


@pytest.fixture(scope="module")
def converted(tmp_path_factory) -> Path:
    """A scene made of photographs in ``images``, whose names have spaces."""
    root = tmp_path_factory.mktemp("room") / "my room"
    write_photographs(root / "images", N)
    convert(ConvertOptions(root, resize=True, sfm=SMALL), Heard())
    return root


@pytest.fixture
def room(converted, tmp_path) -> Path:
    """The photographs alone, in ``input``."""
    root = tmp_path / "scene"
    shutil.copytree(converted / "input", root / "input")
    return root


def known_cameras(names: list[str]) -> dict[str, Camera]:
    return {
        name: Camera(name, WIDTH, HEIGHT, FOCAL, FOCAL, WIDTH / 2, HEIGHT / 2, r, -r @ c)
        for name, (r, c) in zip(names, camera_poses(len(names)), strict=True)
    }


@pytest.mark.slow
def test_cameras_are_found_where_the_photographs_were_taken(converted):
    scene = load_scene(
        converted, size_rule=_AsTheyAre(), eval_split=False, notify=lambda line: None
    )
    found = {camera.name: camera for camera in scene.train_cameras}
    names = [f"IMG {k}.png" for k in range(1, N + 1)]
    assert sorted(found) == sorted(names)
    errors = pose_errors(found, known_cameras(names))
    assert errors.rotation.max() < 0.3
    assert errors.position.max() < 0.5
    # Colours of the points are those of the posters, not black.
    assert scene.points_rgb.std() > 20


class _AsTheyAre:
    def target(self, width: int, height: int) -> tuple[int, int]:
        return width, height


def test_photographs_as_taken_are_kept_and_flat_ones_take_their_place(converted):
    flat = sorted(path.name for path in (converted / "images").iterdir())
    assert flat == sorted(path.name for path in (converted / "input").iterdir())
    cameras = pycolmap.Reconstruction(str(converted / "sparse" / "0")).cameras.values()
    for camera in cameras:
        assert camera.model_name == "PINHOLE"
        for divisor in (1, 2, 4, 8):
            folder = "images" if divisor == 1 else f"images_{divisor}"
            with Image.open(converted / folder / flat[0]) as picture:
                expected = round(camera.width / divisor), round(camera.height / divisor)
                assert picture.size == expected


def test_the_page_and_the_figures_say_what_came_out(converted):
    page = (converted / "convert.html").read_text(encoding="utf-8")
    assert f"{N} of {N}" in page
    # Six photographs are few, whatever else is right.
    assert "usable" in page
    outcome = json.loads((converted / "distorted" / "outcome.json").read_text())
    assert outcome["registered"] == N
    assert outcome["left_out"] == {}


def test_points_lie_where_the_flat_photographs_show_them(converted):
    model = pycolmap.Reconstruction(str(converted / "sparse" / "0"))
    before = model.compute_mean_reprojection_error()
    model.update_point_3d_errors()
    assert model.compute_mean_reprojection_error() == pytest.approx(before, rel=0.05)
    assert before < 0.5


def test_a_second_call_has_nothing_to_do(converted):
    before, console = model_bytes(converted), Heard()
    result = convert(ConvertOptions(converted, resize=True, sfm=SMALL), console)
    assert result.seconds == 0
    assert console.lines[-1].startswith(f"finished before: {N} of {N}")
    assert model_bytes(converted) == before


@pytest.mark.parametrize(
    ("place", "name"),
    [
        pytest.param(matching, "extract_features", marks=pytest.mark.slow),
        (matching, "match_pairs"),
        pytest.param(mapping, "map_photographs", marks=pytest.mark.slow),
        pytest.param(scene_folder, "write_flat_pictures", marks=pytest.mark.slow),
        pytest.param(scene_folder, "write_flat_model", marks=pytest.mark.slow),
        (scene_folder, "publish"),
    ],
)
def test_what_was_cut_short_goes_on_to_the_same_bits(place, name, room, converted, monkeypatch):
    real, left = getattr(place, name), [3]

    def dies(*args, **kwargs):
        advance = args[-1] if callable(args[-1]) else None

        def counts(done: int) -> None:
            left[0] -= 1
            if left[0] < 0:
                raise KeyboardInterrupt
            advance(done)

        real(*args[:-1], counts) if advance else None
        raise KeyboardInterrupt

    monkeypatch.setattr(place, name, dies)
    monkeypatch.setattr(matching, "_PART", 4)
    options = ConvertOptions(room, resize=True, sfm=SMALL)
    with pytest.raises(KeyboardInterrupt):
        convert(options, Heard())
    assert not (room / "sparse").exists()
    monkeypatch.undo()
    convert(options, Heard())
    assert model_bytes(room) == model_bytes(converted)


def test_results_take_their_places_also_after_a_kill_between_two_renames(tmp_path, monkeypatch):
    from sugar_capture.scene_folder import Source, note, publish

    for stop in range(1, 5):
        root = tmp_path / str(stop)
        flat = root / "distorted" / "flat"
        for folder in (root / "images", root / "masks", flat / "images", flat / "masks"):
            folder.mkdir(parents=True)
        (root / "images" / "a.jpg").write_text("as taken")
        (root / "masks" / "a.png").write_text("as taken")
        for name in ("images", "masks"):
            (flat / name / "flat").write_text("flat")
        (flat / "sparse" / "0").mkdir(parents=True)
        source = Source(root, root / "images")
        note(source)
        real, left = Path.rename, [stop]

        def rename(self, target, real=real, left=left):
            left[0] -= 1
            if left[0] < 0:
                raise KeyboardInterrupt
            return real(self, target)

        monkeypatch.setattr(Path, "rename", rename)
        with pytest.raises(KeyboardInterrupt):
            publish(source, flat, root / "masks")
        monkeypatch.undo()
        again = Source(root, root / ("input" if (root / "input").is_dir() else "images"))
        masks = None if (root / "input_masks").is_dir() else root / "masks"
        publish(again, flat, masks)
        assert (root / "input" / "a.jpg").read_text() == "as taken"
        assert (root / "input_masks" / "a.png").read_text() == "as taken"
        assert (root / "images" / "flat").is_file()
        assert (root / "masks" / "flat").is_file()
        assert (root / "sparse" / "0").is_dir()


@pytest.mark.slow
def test_a_killed_process_goes_on(room, converted):
    words = ("-s", room, "--resize", "--extraction_size", WIDTH, "--max_features", 600)
    process = start("gaussian_splatting/convert.py", *words)
    database = room / "distorted" / "database.db"
    while not database.is_file():
        assert process.poll() is None
    process.send_signal(signal.SIGKILL)
    process.wait()
    code, out, err = finish(start("gaussian_splatting/convert.py", *words))
    assert code == 0, err
    assert f"{N} of {N} photographs are registered" in out
    assert model_bytes(room) == model_bytes(converted)


@pytest.mark.slow
def test_masks_hide_features_and_are_made_flat(room):
    (room / "masks").mkdir()
    for path in (room / "input").iterdir():
        mask = np.zeros((HEIGHT, WIDTH), np.uint8)
        mask[:, WIDTH // 3 :] = 255
        Image.fromarray(mask).save(room / "masks" / f"{path.name}.png")
    convert(ConvertOptions(room, sfm=SMALL), Heard())
    with pycolmap.Database.open(str(room / "distorted" / "masked_database.db")) as database:
        for number in range(1, N + 1):
            assert database.read_keypoints(number)[:, 0].min() >= WIDTH // 3
    kept = sorted(path.name for path in (room / "input_masks").iterdir())
    assert kept == sorted(path.name for path in (room / "masks").iterdir())
    scene = load_scene(room, size_rule=_AsTheyAre(), masks=MaskOptions(), notify=lambda _: None)
    assert all(camera.mask is not None for camera in scene.train_cameras)
    # The photographs' own masks are meant by a second call, not the flat ones.
    assert convert(ConvertOptions(room, sfm=SMALL), Heard()).seconds == 0
    # Where the background stood still it may show where the cameras were; the masks stay.
    everywhere = replace(SMALL, masked_features=False)
    convert(ConvertOptions(room, sfm=everywhere), Heard())
    with pycolmap.Database.open(str(room / "distorted" / "database.db")) as database:
        assert database.read_keypoints(1)[:, 0].min() < WIDTH // 4
    assert len(list((room / "masks").iterdir())) == N


def hide_all_but_a_corner(room: Path) -> None:
    (room / "masks").mkdir()
    for path in (room / "input").iterdir():
        mask = np.zeros((HEIGHT, WIDTH), np.uint8)
        mask[: HEIGHT // 4, : WIDTH // 4] = 255
        Image.fromarray(mask).save(room / "masks" / f"{path.name}.png")


@pytest.mark.slow
def test_whole_photographs_are_taken_where_masks_leave_too_little(room, converted, monkeypatch):
    hide_all_but_a_corner(room)
    real, left = mapping.map_photographs, [1]

    def dies(*args):
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        return real(*args)

    # Also when killed in between.
    monkeypatch.setattr(mapping, "map_photographs", dies)
    with pytest.raises(KeyboardInterrupt):
        convert(ConvertOptions(room, resize=True, sfm=SMALL), Heard())
    monkeypatch.undo()
    console = Heard()
    result = convert(ConvertOptions(room, resize=True, sfm=SMALL), console)
    assert result.outcome["registered"] == N
    assert any("registered inside the masks: trying whole ones" in x for x in console.lines)
    assert any(f"{N} of {N} whole photographs are registered" in x for x in console.lines)
    assert model_bytes(room) == model_bytes(converted)
    assert len(list((room / "masks").iterdir())) == N


def hide_most_of_one(room: Path) -> None:
    (room / "masks").mkdir()
    for path in (room / "input").iterdir():
        mask = np.full((HEIGHT, WIDTH), 255, np.uint8)
        mask[:, : WIDTH // 10] = 0
        if path.name == "IMG 3.png":
            mask[HEIGHT // 6 :] = 0
            mask[:, WIDTH // 3 :] = 0
        Image.fromarray(mask).save(room / "masks" / f"{path.name}.png")


@pytest.mark.slow
def test_one_that_is_left_out_inside_masks_is_added_in_whole(room, tmp_path, monkeypatch):
    hide_most_of_one(room)
    killed = tmp_path / "killed"
    shutil.copytree(room, killed)
    console = Heard()
    result = convert(ConvertOptions(room, sfm=SMALL), console)
    assert result.outcome["registered"] == N
    assert "1 whole photographs are added to those registered inside the masks" in console.lines
    # Only what was left out is compared anew, not all whole photographs.
    assert verified_matches(room / "distorted" / "database.db") == {}
    scene = load_scene(room, size_rule=_AsTheyAre(), eval_split=False, notify=lambda _: None)
    cameras = {camera.name: camera for camera in scene.train_cameras}
    errors = pose_errors(cameras, known_cameras([f"IMG {k}.png" for k in range(1, N + 1)]))
    assert errors.rotation.max() < 0.5
    assert errors.position.max() < 1
    real = matching.match_pairs
    paths = []

    def dies(path: Path, *args) -> None:
        real(path, *args)
        paths.append(path.name)
        if path.name == "extended_database.db":
            raise KeyboardInterrupt

    monkeypatch.setattr(matching, "match_pairs", dies)
    with pytest.raises(KeyboardInterrupt):
        convert(ConvertOptions(killed, sfm=SMALL), Heard())
    monkeypatch.undo()
    assert paths == ["masked_database.db", "extended_database.db"]
    convert(ConvertOptions(killed, sfm=SMALL), Heard())
    assert model_bytes(killed) == model_bytes(room)


@pytest.mark.slow
def test_added_photographs_whose_matches_contradict_are_not_taken(room, converted, monkeypatch):
    hide_most_of_one(room)
    contradicting = {"IMG 3.png": (5, 5)}
    monkeypatch.setattr(pair_checks, "contradicting_pairs", lambda *args: contradicting)
    console = Heard()
    convert(ConvertOptions(room, resize=True, sfm=SMALL), console)
    assert f"{N} of {N} whole photographs are registered: these poses are taken" in console.lines
    assert model_bytes(room) == model_bytes(converted)


@pytest.mark.slow
def test_no_photograph_is_lost_by_a_choice_of_pairs(room, monkeypatch):
    def leaves_out_the_last(path: Path, n: int, matcher: str) -> list[tuple[int, int]]:
        return list(itertools.combinations(range(n - 1), 2))

    monkeypatch.setattr(plain_steps, "pairs_to_match", leaves_out_the_last)
    monkeypatch.setattr(plain_steps, "images_apart", lambda matches, n: [])
    result = convert(ConvertOptions(room, sfm=replace(SMALL, matcher="similar")), Heard())
    assert result.outcome["registered"] == N
    steps = [step["name"] for step in result.outcome["steps"]]
    assert "comparing photographs that are left out" in steps


@pytest.mark.slow
def test_where_most_are_left_out_all_pairs_are_compared(room, converted, monkeypatch):
    def first_two(path: Path, n: int, matcher: str) -> list[tuple[int, int]]:
        return [(0, 1)]

    monkeypatch.setattr(plain_steps, "pairs_to_match", first_two)
    monkeypatch.setattr(plain_steps, "images_apart", lambda matches, n: [])
    options = ConvertOptions(room, resize=True, sfm=replace(SMALL, matcher="similar"))
    assert convert(options, Heard()).outcome["registered"] == N
    assert model_bytes(room) == model_bytes(converted)


@pytest.mark.slow
def test_masks_that_place_as_many_stay_in_use(room):
    (room / "masks").mkdir()
    *_, last = sorted((room / "input").iterdir())
    Image.new("RGB", (WIDTH, HEIGHT), (120, 130, 140)).save(last)
    mask = np.full((HEIGHT, WIDTH), 255, np.uint8)
    mask[:, : WIDTH // 10] = 0
    for path in (room / "input").iterdir():
        Image.fromarray(mask).save(room / "masks" / f"{path.name}.png")
    console = Heard()
    assert convert(ConvertOptions(room, sfm=SMALL), console).outcome["registered"] == N - 1
    assert "no more whole photographs are registered: poses from inside the masks are taken" in (
        console.lines
    )
    # Where programs look for it lies what was chosen.
    chosen, masked = (room / "distorted" / name / "0" for name in ("sparse", "masked_mapping"))
    for path in masked.iterdir():
        assert (chosen / path.name).read_bytes() == path.read_bytes()


def test_masks_of_another_shape_are_refused(room):
    (room / "masks").mkdir()
    for path in (room / "input").iterdir():
        Image.new("L", (200, 200), 255).save(room / "masks" / path.name)
    with pytest.raises(UserError, match="another aspect ratio"):
        convert(ConvertOptions(room, sfm=SMALL), Heard())
    assert (room / "masks").is_dir()


@pytest.mark.slow
def test_global_mapping_finds_the_same_cameras(room):
    console = Heard()
    options = ConvertOptions(room, sfm=replace(SMALL, mapper="global"))
    assert convert(options, console).outcome["registered"] == N
    assert f"placing {N} photographs at once, which shows no progress" in console.lines
    scene = load_scene(room, size_rule=_AsTheyAre(), eval_split=False, notify=lambda _: None)
    found = {camera.name: camera for camera in scene.train_cameras}
    errors = pose_errors(found, known_cameras([f"IMG {k}.png" for k in range(1, N + 1)]))
    assert errors.rotation.max() < 0.5
    assert errors.position.max() < 1


def test_poses_that_no_points_support_are_left_out(converted, monkeypatch):
    model = read_reconstruction(converted / "distorted" / "sparse" / "0")
    images = [model.images[number] for number in model.reg_image_ids()]
    counts = {image.name: image.num_points3D for image in images}
    fewest = min(counts.values())
    monkeypatch.setattr(mapping, "_LEAST_POINTS", fewest)
    mapping._leave_out_unsupported(model)
    assert model.num_reg_images() == len(counts)
    monkeypatch.setattr(mapping, "_LEAST_POINTS", fewest + 1)
    mapping._leave_out_unsupported(model)
    kept = {model.images[number].name for number in model.reg_image_ids()}
    assert kept == {name for name, count in counts.items() if count > fewest}
    assert len(kept) < len(counts)


def test_a_large_model_keeps_its_poses_when_others_are_added(converted, tmp_path, monkeypatch):
    work = converted / "distorted"
    database = shutil.copy(work / "database.db", tmp_path / "database.db")
    start = read_reconstruction(work / "sparse" / "0")
    names = sorted(image.name for image in start.images.values())
    start.deregister_frame(start.images[2].frame_id)
    kept = start.reg_image_ids()

    def turns(model: pycolmap.Reconstruction) -> np.ndarray:
        """Rotations from the first camera to each; they do not depend on the model's frame."""
        rotations = [model.images[k].cam_from_world().rotation.matrix() for k in kept]
        return np.stack(rotations) @ rotations[0].T

    before = turns(start)
    folder = tmp_path / "sparse"

    def added(most_one_by_one: int) -> pycolmap.Reconstruction:
        monkeypatch.setattr(mapping, "MAX_INCREMENTAL", most_one_by_one)
        options = mapping.MappingOptions("global", 0)
        models = mapping.map_photographs(
            database, names, folder, options, None, lambda n: None, start
        )
        assert models.n_registered == N
        return models.largest

    np.testing.assert_allclose(turns(added(N - 2)), before, atol=1e-9)
    assert np.abs(turns(added(N)) - before).max() > 1e-7


@pytest.fixture
def placing_at_once_leaves_one_out(monkeypatch):
    real = mapping._map_globally

    def leaves_one_out(*args) -> list[pycolmap.Reconstruction]:
        models = real(*args)
        models[0].deregister_frame(models[0].images[2].frame_id)
        return models

    monkeypatch.setattr(mapping, "_map_globally", leaves_one_out)
    monkeypatch.setattr(mapping, "MAX_INCREMENTAL", N - 1)


@pytest.mark.slow
@pytest.mark.usefixtures("placing_at_once_leaves_one_out")
def test_what_placing_at_once_leaves_out_is_placed_one_by_one(room, converted):
    console = Heard()
    result = convert(ConvertOptions(room, resize=True, sfm=SMALL), console)
    assert result.outcome["registered"] == N
    line = f"{N - 1} of {N} photographs are placed at once, reprojection error "
    assert any(text.startswith(line) for text in console.lines)
    assert model_bytes(room) == model_bytes(converted)
    assert not (room / "distorted" / "mapping_one_by_one").exists()


@pytest.mark.slow
@pytest.mark.usefixtures("placing_at_once_leaves_one_out")
def test_the_few_that_placing_at_once_leaves_out_are_added_to_its_model(room, monkeypatch):
    monkeypatch.setattr(plain_steps, "_FEW_UNREGISTERED", 1 / N)
    console = Heard()
    sfm = replace(SMALL, matcher="similar")
    result = convert(ConvertOptions(room, sfm=sfm), console)
    assert result.outcome["registered"] == N
    assert not any("placed at once" in text for text in console.lines)


def test_without_a_global_mapper_it_is_one_line(room, monkeypatch):
    monkeypatch.delattr(pycolmap, "global_mapping", raising=False)
    with pytest.raises(UserError, match="--mapper global: pycolmap .* has none"):
        convert(ConvertOptions(room, sfm=replace(SMALL, mapper="global")), Heard())
    assert not (room / "distorted" / "database.db").exists()


@pytest.mark.slow
def test_two_unrelated_sets_are_told_apart(room):
    write_photographs(room / "input", N, seed=5, name="other {}.png")
    with pytest.raises(
        UserError, match=f"fall into sets that share nothing: {N} from .* and {N} from"
    ):
        convert(ConvertOptions(room, sfm=SMALL), Heard())
    assert not (room / "sparse").exists()


@pytest.mark.slow
def test_a_blurred_photograph_is_named_with_the_reason(room):
    path = room / "input" / "IMG 3.png"
    with Image.open(path) as picture:
        blurred = picture.filter(ImageFilter.GaussianBlur(6))
    blurred.save(path)
    result = convert(ConvertOptions(room, sfm=SMALL), Heard())
    assert result.outcome["registered"] == N - 1
    assert "IMG 3.png (blurred)" in result.outcome["line"]
    assert "add photographs between IMG 2.png and IMG 4.png" in result.outcome["advice"][0]


@pytest.mark.slow
def test_blurred_photographs_alone_are_refused_with_advice(room):
    for path in (room / "input").iterdir():
        with Image.open(path) as picture:
            blurred = picture.filter(ImageFilter.GaussianBlur(8))
        blurred.save(path)
    with pytest.raises(UserError, match=f"{N} of them are blurred; hold the camera still"):
        convert(ConvertOptions(room, sfm=SMALL), Heard())


def test_a_source_that_is_none_is_one_line(tmp_path):
    (tmp_path / "notes.txt").write_text("no photographs")
    for name in ("a.mp4", "b.mp4"):
        (tmp_path / name).write_bytes(b"frames")
    for source, reason in (
        (tmp_path / "gone.mp4", "no such video"),
        (tmp_path / "notes.txt", "neither a folder of photographs nor a video"),
        (tmp_path, "2 videos"),
    ):
        with pytest.raises(UserError, match=reason):
            convert(ConvertOptions(source), Heard())


def test_nothing_to_work_with_is_one_line(tmp_path):
    with pytest.raises(UserError, match="no such folder"):
        convert(ConvertOptions(tmp_path / "gone"), Heard())
    with pytest.raises(UserError, match="no photographs in it; put them"):
        convert(ConvertOptions(tmp_path), Heard())
    (tmp_path / "a.NEF").write_bytes(b"raw")
    with pytest.raises(UserError, match="1 raw photographs"):
        convert(ConvertOptions(tmp_path), Heard())
    write_photographs(tmp_path / "input", 2)
    with pytest.raises(UserError, match="2 photographs; at least 3 are needed"):
        convert(ConvertOptions(tmp_path), Heard())
    (tmp_path / "input" / "broken.jpg").write_bytes(b"no picture")
    console = Heard()
    with pytest.raises(UserError, match="2 photographs; at least 3 are needed"):
        convert(ConvertOptions(tmp_path), console)
    assert "left out 1 of 3 photographs that cannot be read: broken.jpg (" in console.lines[-1]


@pytest.mark.slow
def test_cameras_of_others_are_not_replaced_unasked(converted, tmp_path):
    root = tmp_path / "theirs"
    shutil.copytree(converted / "input", root / "images")
    shutil.copytree(converted / "sparse", root / "sparse")
    with pytest.raises(UserError, match="has cameras already"):
        convert(ConvertOptions(root, sfm=SMALL), Heard())
    assert not needs_cameras(root)
    convert(ConvertOptions(root, overwrite=True, sfm=SMALL), Heard())
    assert (root / "distorted" / "old_sparse" / "0").is_dir()
    assert len(list((root / "input").iterdir())) == N


def test_skip_matching_takes_the_model_that_is_there(converted, tmp_path):
    root = tmp_path / "scene"
    shutil.copytree(converted / "input", root / "input")
    with pytest.raises(UserError, match="--skip_matching: no model in"):
        convert(ConvertOptions(root, skip_matching=True), Heard())
    shutil.copytree(converted / "distorted" / "sparse", root / "distorted" / "sparse")
    convert(ConvertOptions(root, skip_matching=True), Heard())
    assert model_bytes(root) == model_bytes(converted)


@pytest.mark.slow
def test_photographs_in_the_folder_itself_stay_there(converted, tmp_path):
    root = tmp_path / "phone"
    shutil.copytree(converted / "input", root)
    assert needs_cameras(root)
    convert(ConvertOptions(root, sfm=SMALL), Heard())
    assert len(list(root.glob("*.png"))) == N
    assert len(list((root / "images").iterdir())) == N
    assert not needs_cameras(root)
    assert convert(ConvertOptions(root, sfm=SMALL), Heard()).seconds == 0


def test_features_do_not_depend_on_the_size_they_are_looked_for_at(tmp_path):
    pose = camera_poses(1)[0]
    Image.fromarray(photograph(*pose, width=480, height=360)).save(tmp_path / "a.png")
    photographs = described_photographs(tmp_path, True)
    places = []
    for size in (480, 240):
        path = tmp_path / f"{size}.db"
        create_database(path, photographs, None)
        extract_features(path, photographs, size, 500, lambda done: None)
        with pycolmap.Database.open(str(path)) as database:
            places.append(database.read_keypoints(1)[:, :2])
    # Half of what is found in the small picture is found in the large one at the same place.
    apart = np.linalg.norm(places[1][:, None] - places[0][None], axis=2).min(axis=1)
    assert np.median(apart) < 1.5


def test_flags_of_the_original_are_accepted(tmp_path):
    words = "--no_gpu --camera PINHOLE --colmap_executable colmap --resize --magick_executable m"
    options = parse(ConvertOptions, ["-s", str(tmp_path), *words.split()])
    assert options.sfm.camera == "PINHOLE"
    assert options.resize
    assert len(options.inert.messages) == 3
    with pytest.raises(UserError, match="-s/--source_path is missing"):
        parse(ConvertOptions, [])
    with pytest.raises(UserError, match="--camera FISH is unknown; choose one of"):
        create_database(tmp_path / "a.db", [], "FISH")


def test_a_pose_that_contradicts_its_matches_is_named(converted):
    model = pycolmap.Reconstruction(converted / "distorted" / "sparse" / "0")
    database = converted / "distorted" / "database.db"
    names = sorted(path.name for path in (converted / "input").iterdir())
    matches = verified_matches(database)
    assert contradicting_pairs(model, database, names, matches) == {}
    image = next(image for image in model.images.values() if image.name == names[3])
    turn = pycolmap.Rigid3d(pycolmap.Rotation3d([0, np.sin(0.1), 0, np.cos(0.1)]), np.zeros(3))
    image.frame.set_cam_from_world(image.camera_id, turn * image.cam_from_world())
    found = contradicting_pairs(model, database, names, matches)
    assert list(found) == [names[3]]
    wrong, n = found[names[3]]
    assert 1 < wrong <= n
