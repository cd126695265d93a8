# SPDX-License-Identifier: Apache-2.0
"""Masks are found under the names that programs give them, and checked first."""

import json
import shutil

import numpy as np
import pytest
import torch
from PIL import Image

import train
from gaussian_splatting import train as vanilla_train
from gaussian_splatting.data import images
from gaussian_splatting.data.images import ImageStore, composited, dilated, eroded, outlined
from gaussian_splatting.data.masks import MaskOptions
from gaussian_splatting.engine.run_identity import scene_inputs
from gaussian_splatting.scenes.scene import VanillaSize, load_scene
from sugar_utils.errors import UserError
from tests.support.captures import PINHOLE, make_scene, write_scene
from tests.support.tiny_scene import refusal, run_cli

NAMES = ("IMG_1.JPG", "IMG_2.JPG", "other/IMG_3.JPG")
SIZE = (40, 30)


@pytest.fixture
def capture(tmp_path):
    root = tmp_path / "capture"
    make_scene(root, dict.fromkeys(NAMES, PINHOLE))
    return root


def write_mask(path, value=255, size=SIZE, left=10):
    """Counts right of a column."""
    pixels = np.zeros(size[::-1], np.uint8)
    pixels[:, left:] = value
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)
    return path


def load(root, masks=None, mode="object", divisor=1, notes=None):
    return load_scene(
        root,
        size_rule=VanillaSize(divisor),
        eval_split=False,
        masks=MaskOptions(masks, mode),
        notify=(notes if notes is not None else []).append,
    )


def mask_names(scene):
    return [None if c.mask is None else c.mask.path.name for c in scene.train_cameras]


@pytest.mark.parametrize(
    ("folder", "names"),
    [
        ("masks", ["IMG_1.JPG.png", "IMG_2.JPG.png", "other/IMG_3.JPG.png"]),
        ("masks", ["IMG_1.png", "IMG_2.png", "other/IMG_3.png"]),
        ("mask", ["img_1.bmp", "img_2.bmp", "img_3.bmp"]),
        ("masks", ["IMG_1.JPG", "IMG_2.JPG", "other/IMG_3.JPG"]),
        ("masks", ["IMG_1_mask.png", "IMG_2_MASK.PNG", "other/IMG_3_mask.jpg"]),
        ("masks", ["IMG_1-mask.png", "IMG_2-mask.png", "IMG_3-mask.png"]),
        ("masks", ["IMG_1.JPG.mask.png", "IMG_2.jpg.mask.png", "other/IMG_3.JPG.mask.png"]),
        ("masks", ["IMG_1.mask.png", "IMG_2.mask.png", "other/IMG_3.mask.png"]),
    ],
)
def test_masks_are_found_under_the_names_of_several_programs(capture, folder, names):
    for name in names:
        write_mask(capture / folder / name)
    notes = []
    scene = load(capture, notes=notes)
    assert mask_names(scene) == [name.rpartition("/")[2] for name in names]
    assert any("masks of 3 of 3 photographs" in note and folder in note for note in notes)


def test_numbered_masks_belong_to_the_sorted_photographs(tmp_path):
    names = [f"photo_{letter}.png" for letter in "abc"]
    make_scene(tmp_path, dict.fromkeys(names[1:], PINHOLE))
    # One that the reconstruction did not register counts, too.
    shutil.copy(tmp_path / "images" / names[1], tmp_path / "images" / names[0])
    for number in range(3):
        write_mask(tmp_path / "mask" / f"{number:03}.png")
    assert mask_names(load(tmp_path)) == ["001.png", "002.png"]


def test_numbers_of_masks_are_no_text(tmp_path):
    names = [f"{number:02}.png" for number in range(1, 13)]
    make_scene(tmp_path, dict.fromkeys(names, PINHOLE))
    for number in range(12):
        write_mask(tmp_path / "masks" / f"{number}.png")
    assert mask_names(load(tmp_path)) == [f"{number}.png" for number in range(12)]
    (tmp_path / "masks" / "11.png").unlink()
    with pytest.raises(UserError, match="unclear which of the 11 numbered masks"):
        load(tmp_path)


def test_a_mask_of_a_name_without_folder_belongs_to_none_of_two(tmp_path):
    make_scene(tmp_path, dict.fromkeys(["a/1.png", "b/1.png", "b/2.png"], PINHOLE))
    for name in ("x1.jpg", "1.jpg", "2.jpg"):
        write_mask(tmp_path / "masks" / name)
    assert mask_names(load(tmp_path)) == [None, None, "2.jpg"]


def test_masks_that_frames_name_win_over_a_folder(tmp_path):
    path = write_scene(tmp_path)
    content = json.loads(path.read_text())
    for number, frame in enumerate(content["frames"]):
        write_mask(tmp_path / "masks/deep" / f"m{number}.png", size=(20, 16))
        frame["mask_path"] = f"C:\\scan\\masks\\deep\\m{number}.jpg"
    path.write_text(json.dumps(content))
    assert mask_names(load(tmp_path)) == ["m0.png", "m1.png", "m2.png"]


def test_transforms_name_their_masks(tmp_path):
    path = write_scene(tmp_path)
    content = json.loads(path.read_text())
    for number, frame in enumerate(content["frames"]):
        write_mask(tmp_path / "hidden" / f"m{number}.png", size=(20, 16))
        frame["mask_path"] = f"hidden/m{number}.png"
    path.write_text(json.dumps(content))
    assert mask_names(load(tmp_path)) == ["m0.png", "m1.png", "m2.png"]
    assert mask_names(load(tmp_path, "none")) == [None] * 3


def test_alpha_is_a_mask_where_it_is_asked_for(capture):
    photograph = np.full((30, 40, 4), 200, np.uint8)
    photograph[:, :20, 3] = 0
    photograph[:, 20:30, 3] = 128
    photograph[:, 30:, 3] = 255
    for name in NAMES:
        Image.fromarray(photograph).save(capture / "images" / name, format="PNG")
    assert mask_names(load(capture)) == [None] * 3
    scene = load(capture, "alpha")
    image = ImageStore().get(scene.train_cameras[0])
    assert image.shape == (30, 40, 4)
    assert image[0, :, 3].tolist() == [0] * 20 + [128] * 10 + [255] * 10
    # Colours are not darkened by their transparency.
    assert (image[:, 20:, :3].int() - 200).abs().max() <= 1


def test_nothing_is_masked_without_a_folder_or_with_none(capture):
    assert mask_names(load(capture)) == [None] * 3
    assert "masks" not in scene_inputs(load(capture))
    write_mask(capture / "masks" / "IMG_1.png")
    assert mask_names(load(capture, "none")) == [None] * 3


def test_a_folder_that_holds_something_else_is_left_alone(capture):
    write_mask(capture / "mask" / "unrelated.png")
    notes = []
    assert mask_names(load(capture, notes=notes)) == [None] * 3
    assert "going on without masks" in notes[-1]


def test_masks_identify_a_run_by_content_and_mode(capture):
    path = write_mask(capture / "masks" / "IMG_1.png")
    first = scene_inputs(load(capture))["masks"]
    assert list(first) == ["IMG_1.JPG"]
    assert scene_inputs(load(capture, mode="ignore"))["masks"] != first
    write_mask(path, left=11)
    assert scene_inputs(load(capture))["masks"] != first


def test_masks_of_another_size_are_resized_by_means(capture):
    for name in NAMES:
        write_mask(capture / "masks" / f"{name}.png", size=(80, 60), left=21)
    camera = load(capture).train_cameras[0]
    mask = ImageStore().get(camera)[..., 3]
    # Column 10 covers columns 20 and 21 of the file.
    assert mask[0, 9:12].tolist() == [0, 128, 255]
    assert ImageStore().get(load(capture, divisor=2).train_cameras[0]).shape == (15, 20, 4)


@pytest.mark.slow
@pytest.mark.parametrize("value", [1, 2, 100, 127, 128, 255])
@pytest.mark.parametrize("kind", ["L", "I;16", "P"])
def test_masks_of_two_values_count_where_they_are_not_0(capture, value, kind):
    path = write_mask(capture / "masks" / "IMG_1.png", value=value)
    pixels = np.asarray(Image.open(path))
    image = Image.fromarray(pixels.astype(np.uint16) if kind == "I;16" else pixels)
    if kind == "P":
        image.putpalette([0, 0, 0, *[value, 0, value // 2] * 255])
    image.save(path)
    notes = []
    camera = load(capture, notes=notes).train_cameras[0]
    assert ImageStore().get(camera)[0, :, 3].tolist() == [0] * 10 + [255] * 30
    said = f"masks hold labels (IMG_1.png: 0, {value}): all but 0 counts"
    assert (said in notes) is (value != 255)


def write_values(path, values):
    """A mask of vertical stripes of these values, as wide as each other."""
    rows = np.tile(np.repeat(np.array(values, np.uint8), SIZE[0] // len(values), axis=0), (30, 1))
    if rows.ndim == 3:
        rows = rows.reshape(30, -1, 3)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(rows).save(path, quality=95)


def counted_stripes(scene, number=0):
    """Whether the middle column of each of four stripes counts."""
    values = ImageStore().get(scene.train_cameras[number])[15, 5::10, 3]
    return (values >= 128).tolist()


MEANINGS = {
    "labels": ([0, 1, 2, 7], [False, True, True, True], "labels (IMG_1.png: 0, 1, 2, 7)"),
    "brightness": ([0, 127, 128, 255], [False, False, True, True], None),
    "dim.jpg": ([0, 40, 60, 100], [False, False, True, True], "masks are dim: the brightest"),
}


@pytest.mark.parametrize("kind", MEANINGS)
def test_the_values_of_masks_are_labels_or_brightness(capture, kind):
    values, expected, line = MEANINGS[kind]
    ending = "jpg" if kind.endswith("jpg") else "png"
    write_values(capture / "masks" / f"IMG_1.{ending}", values)
    notes = []
    assert counted_stripes(load(capture, notes=notes)) == expected
    unusual = [note for note in notes if note.startswith(("masks hold", "masks are dim"))]
    assert [line in note for note in unusual] == [True] * (line is not None)


def test_masks_in_colours_are_labels(capture):
    path = capture / "masks" / "IMG_1.png"
    write_values(path, [0, 64, 128, 192])
    grey = np.asarray(Image.open(path))
    Image.fromarray(np.stack([grey, 0 * grey, grey // 2], axis=2)).save(path)
    assert counted_stripes(load(capture)) == [False, True, True, True]


def test_one_meaning_holds_for_all_masks_of_a_capture(capture):
    write_values(capture / "masks" / "IMG_1.png", [0, 30, 100, 120])
    write_mask(capture / "masks" / "IMG_2.png", 255)
    write_mask(capture / "masks" / "other" / "IMG_3.png", 255)
    with pytest.raises(UserError, match=r"IMG_1.png: no pixel of the mask is at least 128 of 255"):
        load(capture)
    write_mask(capture / "masks" / "IMG_2.png", 2)
    write_mask(capture / "masks" / "other" / "IMG_3.png", 3)
    assert counted_stripes(load(capture)) == [False, True, True, True]


@pytest.mark.parametrize("mode", ["object", "ignore"])
def test_no_training_begins_where_no_pixel_counts(capture, tmp_path, capsys, mode):
    """Lines of one pixel are lost in images of an eighth of the size."""
    for name in NAMES:
        pixels = np.zeros(SIZE[::-1], np.uint8)
        pixels[:, 20] = 255
        path = capture / "masks" / f"{name}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(path)
    flags = ("-s", capture, "-m", tmp_path / "model", "--iterations", 1, "--mask_mode", mode)
    assert "no pixel of any training view counts" in refusal(
        capsys, vanilla_train.main, *flags, "--resolution", 8
    )
    assert not (tmp_path / "model").exists()


def test_masks_of_a_distorted_photograph_are_undistorted_with_it(tmp_path):
    lens = ("SIMPLE_RADIAL", 40, 30, [35.0, 20.0, 15.0, -0.2])
    make_scene(tmp_path, {"a.png": lens, "b.png": lens})
    shutil.copytree(tmp_path / "images", tmp_path / "masks")
    for name in ("a.png", "b.png"):
        Image.open(tmp_path / "masks" / name).convert("L").save(tmp_path / "masks" / name)
        Image.open(tmp_path / "masks" / name).convert("RGB").save(tmp_path / "images" / name)
    image = ImageStore().get(load(tmp_path).train_cameras[0])
    assert (image[..., 0].int() - image[..., 3].int()).abs().max() <= 1


def test_bytes_of_masks_count_in_the_budget(capture):
    write_mask(capture / "masks" / "IMG_1.png")
    with ImageStore() as store:
        for camera in load(capture).train_cameras:
            store.get(camera)
        assert store.n_bytes == 40 * 30 * (4 + 3 + 3)


def test_photographs_without_a_mask_are_named(capture):
    write_mask(capture / "masks" / "IMG_1.png")
    notes = []
    assert mask_names(load(capture, notes=notes)) == ["IMG_1.png", None, None]
    assert "2 of 3 photographs have no mask and count whole (IMG_2.JPG" in notes[-1]


BAD = {
    "all black": (lambda folder: write_mask(folder / "IMG_1.png", 0), "IMG_1.png: .*all black"),
    "dark": (lambda folder: write_values(folder / "IMG_1.jpg", [0, 3, 9, 14]), "at least 128"),
    "size": (lambda f: write_mask(f / "IMG_1.png", size=(40, 40)), "40 x 40 px.*40 x 30 px"),
    "no image": (lambda f: (f / "IMG_1.png").write_bytes(b"nothing"), "cannot read the image"),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_mask_is_one_line_before_anything_is_written(capture, tmp_path, capsys, kind):
    damage, message = BAD[kind]
    (capture / "masks").mkdir()
    damage(capture / "masks")
    with pytest.raises(UserError, match=message):
        load(capture)
    output = tmp_path / "model"
    refusal(capsys, vanilla_train.main, "-s", capture, "-m", output, "--iterations", 1)
    assert not output.exists()


@pytest.mark.parametrize(
    ("masks", "message"),
    [
        ("absent", "--masks absent: no such folder"),
        ("alpha", "no photograph .* alpha channel"),
        ("images/other", "no mask belongs to a photograph|of 3"),
    ],
)
def test_masks_that_were_asked_for_must_be_there(capture, masks, message):
    if masks == "images/other":
        masks = "empty"
        (capture / masks).mkdir()
    with pytest.raises(UserError, match=message):
        load(capture, masks)


def test_the_doctor_says_what_masks_leave(capture, capsys):
    for name in NAMES:
        write_mask(capture / "masks" / f"{name}.png")
    run_cli(train.main, "--doctor", "-s", capture, "--eval", "False")
    out = " ".join(capsys.readouterr().out.split())
    assert "3 of 3, mode object; 75% of their pixels count" in out


# Pixels


def test_an_object_is_composited_on_the_colour_and_rounded():
    photograph = torch.tensor([[[200, 0, 10, 255], [200, 0, 10, 0], [200, 0, 10, 51]]]).byte()
    found = composited(photograph, torch.tensor([0, 100, 255]).byte())
    assert found.tolist() == [[[200, 0, 10], [0, 100, 255], [40, 80, 206]]]


def test_an_object_is_composited_some_rows_at_a_time(monkeypatch):
    draws = torch.Generator().manual_seed(0)
    photograph = torch.randint(0, 256, (7, 3, 4), generator=draws).byte()
    color = torch.tensor([0, 100, 255]).byte()
    expected = composited(photograph, color)
    monkeypatch.setattr(images, "_COMPOSITED_AT_ONCE", 6)
    assert torch.equal(composited(photograph, color), expected)


def test_masks_grow_and_shrink_but_not_from_the_border():
    mask = torch.zeros(5, 6, dtype=torch.bool)
    mask[2, 3] = True
    assert dilated(mask, 1).nonzero().tolist() == [[y, x] for y in (1, 2, 3) for x in (2, 3, 4)]
    assert torch.equal(eroded(dilated(mask, 1), 1), mask)
    assert eroded(torch.ones(5, 6, dtype=torch.bool), 2).all()


def test_the_outline_surrounds_what_counts():
    photograph = torch.zeros(6, 6, 4, dtype=torch.uint8)
    photograph[2:4, 2:4, 3] = 255
    drawn = outlined(photograph).amax(dim=2) > 0
    assert int(drawn.sum()) == 12
    assert not drawn[2:4, 2:4].any()
