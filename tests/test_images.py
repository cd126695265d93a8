# SPDX-License-Identifier: Apache-2.0
"""Sizes, decoding, finding files by name, and the store of decoded images."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from gaussian_splatting.data import images
from gaussian_splatting.data.cameras import Camera
from gaussian_splatting.data.images import (
    ImageStore,
    decode_image,
    fit_to_file,
)
from gaussian_splatting.data.names import ImageFolder, ImagePlaces, missing_images
from gaussian_splatting.scenes.scene import VanillaSize
from sugar_trainers.capture import SugarSize
from sugar_utils import device
from sugar_utils.errors import UserError


def camera_for(path: Path | None, width: int = 8, height: int = 6) -> Camera:
    name = path.name if path else "none"
    return Camera(
        name, width, height, 10.0, 11.0, width / 2 - 1, height / 2, np.eye(3), np.zeros(3), path
    )


def save_noise(path: Path, width: int = 8, height: int = 6, channels: int = 3) -> np.ndarray:
    pixels = np.random.default_rng(0).integers(0, 256, (height, width, channels), dtype=np.uint8)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)
    return pixels


def decodings(monkeypatch) -> list[str]:
    """Names of the cameras whose photographs are decoded from now on."""
    names, decode = [], images.decode_view

    def noted(camera, white):
        names.append(camera.name)
        return decode(camera, white)

    monkeypatch.setattr(images, "decode_view", noted)
    return names


@pytest.mark.parametrize(
    ("rule", "size", "target"),
    [
        (SugarSize(), (5187, 3361), (1920, 1244)),
        (SugarSize(), (800, 600), (800, 600)),
        (SugarSize(img_resolution=2), (5187, 3361), (960, 622)),
        (SugarSize(img_resolution=2), (801, 3), (400, 2)),
        (SugarSize(img_size_limit=960), (600, 1920), (300, 960)),
        (SugarSize(resolution_factor=1.6), (5187, 3361), (3242, 2101)),
        (SugarSize(img_resolution=4, img_size_limit=10, resolution_factor=1.0), (50, 40), (50, 40)),
        (SugarSize(img_resolution=8), (3, 3), (1, 1)),
        (VanillaSize(), (1600, 900), (1600, 900)),
        (VanillaSize(), (5187, 3361), (1600, 1036)),
        (VanillaSize(1), (5187, 3361), (5187, 3361)),
        (VanillaSize(2), (5187, 3361), (2594, 1680)),
        (VanillaSize(400), (1000, 333), (400, 133)),
    ],
)
def test_size_rules(rule, size, target):
    assert rule.target(*size) == target


@pytest.mark.parametrize(
    "build",
    [
        lambda: SugarSize(img_resolution=3),
        lambda: SugarSize(img_size_limit=0),
        lambda: SugarSize(resolution_factor=0.0),
        lambda: SugarSize(resolution_factor=float("nan")),
        lambda: VanillaSize(0),
        lambda: VanillaSize(-2),
    ],
)
def test_impossible_sizes_are_refused(build):
    with pytest.raises(UserError, match="--"):
        build()


@pytest.mark.parametrize("white", [False, True])
def test_alpha_is_composited_and_truncated_before_resizing(tmp_path, white):
    pixels = save_noise(tmp_path / "a.png", channels=4)
    rgb, alpha = pixels[..., :3].astype(int), pixels[..., 3:].astype(int)
    expected = (rgb * alpha + (255 * (255 - alpha) if white else 0)) // 255
    np.testing.assert_array_equal(decode_image(tmp_path / "a.png", 8, 6, white), expected)
    small = Image.fromarray(expected.astype(np.uint8)).resize((4, 3), Image.Resampling.BICUBIC)
    np.testing.assert_array_equal(decode_image(tmp_path / "a.png", 4, 3, white), np.asarray(small))


def test_an_opaque_image_passes_unchanged(tmp_path):
    pixels = save_noise(tmp_path / "a.png")
    decoded = decode_image(tmp_path / "a.png", 8, 6)
    assert decoded.dtype == np.uint8
    np.testing.assert_array_equal(decoded, pixels)


def test_deep_grey_palette_and_cmyk_images_become_8_bit_rgb(tmp_path):
    ramp = np.linspace(0, 65535, 48).astype(np.uint16).reshape(6, 8)
    Image.fromarray(ramp).save(tmp_path / "deep.png")
    Image.fromarray((ramp / 65535).astype(np.float32)).save(tmp_path / "float.tif")
    grey = np.rint(ramp / 257).astype(np.uint8)
    for name in ("deep.png", "float.tif"):
        decoded = decode_image(tmp_path / name, 8, 6)
        np.testing.assert_array_equal(decoded, np.repeat(grey[..., None], 3, axis=2))

    palette = Image.new("P", (8, 6), 1)
    palette.putpalette([0, 0, 0, 10, 20, 30])
    palette.save(tmp_path / "palette.png")
    assert (decode_image(tmp_path / "palette.png", 8, 6) == [10, 20, 30]).all()
    palette.save(tmp_path / "clear.png", transparency=1)
    assert (decode_image(tmp_path / "clear.png", 8, 6, white_background=True) == 255).all()
    Image.new("LA", (8, 6), (100, 255)).save(tmp_path / "la.png")
    assert (decode_image(tmp_path / "la.png", 8, 6) == 100).all()
    Image.new("CMYK", (8, 6), (0, 0, 0, 255)).save(tmp_path / "cmyk.jpg")
    assert decode_image(tmp_path / "cmyk.jpg", 8, 6).max() < 40


def test_exif_orientation_is_not_applied(tmp_path):
    image = Image.new("RGB", (8, 6))
    exif = image.getexif()
    exif[0x0112] = 6
    image.save(tmp_path / "a.jpg", exif=exif)
    assert fit_to_file(camera_for(tmp_path / "a.jpg")).width == 8
    assert decode_image(tmp_path / "a.jpg", 8, 6).shape == (6, 8, 3)


@pytest.mark.parametrize("content", [b"", b"no image", None])
def test_damaged_images_are_named(tmp_path, content):
    path = tmp_path / "broken.png"
    if content is None:
        save_noise(path, 80, 60)
        path.write_bytes(path.read_bytes()[:3000])
    else:
        path.write_bytes(content)
    with pytest.raises(UserError, match=r"broken\.png"):
        decode_image(path, 8, 6)


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("a.jpg", "a.jpg"),
        ("A.JPG", "a.jpg"),
        ("b", "b.JPG"),
        ("b.png", "b.JPG"),
        ("left/c.0001", "left/c.0001.png"),
        ("dotted", "dotted.name.png"),
        ("LEFT/C.0001.PNG", "left/c.0001.png"),
        ("left\\c.0001.png", "left/c.0001.png"),
        ("deep", "left/deep.png"),
        ("twin", "twin.png"),
        ("double.jpg.jpg", None),
        ("two", None),
        ("notes", None),
        ("absent.png", None),
    ],
)
def test_images_are_found_by_all_the_names_in_use(tmp_path, name, found):
    for path in (
        *("a.jpg", "b.JPG", "left/c.0001.png", "dotted.name.png", "left/deep.png", "notes.txt"),
        *("twin.jpg", "twin.png", "x/two.png", "y/two.png", "._b.png", "two.a.png", "two.b.png"),
    ):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).touch()
    match = ImageFolder(tmp_path).find(name)
    # A file system that ignores case finds the exact path first.
    assert (match and match.relative_to(tmp_path).as_posix().lower()) == (found and found.lower())


def test_missing_images_name_three_of_all(tmp_path):
    error = missing_images(["a", "b", "c", "d"], 9, ImagePlaces(ImageFolder(tmp_path)))
    assert "4 of 9" in str(error)
    assert "a, b, c, ..." in str(error)
    assert str(tmp_path) in str(error)


def test_a_scaled_file_scales_the_intrinsics(tmp_path):
    save_noise(tmp_path / "a.png", 33, 25)
    camera = fit_to_file(camera_for(tmp_path / "a.png", 100, 75))
    assert (camera.width, camera.height) == (33, 25)
    assert camera.fx == pytest.approx(3.3)
    assert camera.cx == pytest.approx(49 * 0.33)


@pytest.mark.parametrize("size", [(75, 100), (100, 60), (50, 50)])
def test_another_aspect_ratio_is_an_error_with_both_sizes(tmp_path, size):
    save_noise(tmp_path / "a.png", *size)
    with pytest.raises(UserError, match=rf"a\.png is 100 x 75 px.*{size[0]} x {size[1]} px"):
        fit_to_file(camera_for(tmp_path / "a.png", 100, 75))


def test_the_store_decodes_each_image_once(tmp_path, monkeypatch):
    decoded = decodings(monkeypatch)
    pixels = save_noise(tmp_path / "a.png")
    camera = camera_for(tmp_path / "a.png")
    with ImageStore() as store:
        first = store.get(camera)
        assert first.dtype == torch.uint8
        assert first.shape == (6, 8, 3)
        np.testing.assert_array_equal(first.numpy(), pixels)
        assert store.get(camera) is first
        assert decoded == ["a.png"]
        assert store.n_bytes == 6 * 8 * 3
        assert store.get(camera.resized(4, 3)).shape == (3, 4, 3)


def test_the_least_recently_used_image_leaves_first(tmp_path, monkeypatch):
    decoded = decodings(monkeypatch)
    cameras = []
    for name in "abc":
        save_noise(tmp_path / f"{name}.png")
        cameras.append(camera_for(tmp_path / f"{name}.png"))
    a, b, c = cameras
    with ImageStore(budget_bytes=2 * 6 * 8 * 3) as store:
        for camera in (a, b, a, c, a):
            store.get(camera)
            assert store.n_bytes <= 2 * 6 * 8 * 3
        assert decoded == ["a.png", "b.png", "c.png"]
        store.get(b)
        assert decoded[3:] == ["b.png"]


def test_a_prefetched_image_is_decoded_once_even_without_a_budget(tmp_path, monkeypatch):
    pixels = save_noise(tmp_path / "a.png")
    camera = camera_for(tmp_path / "a.png")
    decoded = decodings(monkeypatch)
    with ImageStore(budget_bytes=0) as store:
        for n in range(1, 4):
            store.prefetch(camera)
            store.prefetch(camera)
            np.testing.assert_array_equal(store.get(camera).numpy(), pixels)
            assert len(decoded) == n
        assert store.n_bytes == 0


def test_prefetching_gives_the_same_bits_as_decoding_on_demand(tmp_path):
    cameras = []
    for i in range(6):
        save_noise(tmp_path / f"{i}.jpg", 40, 30)
        cameras.append(camera_for(tmp_path / f"{i}.jpg", 13, 9))
    with ImageStore(budget_bytes=800) as ahead, ImageStore() as plain:
        for now, following in zip(cameras, [*cameras[1:], cameras[0]], strict=True):
            ahead.prefetch(following)
            assert torch.equal(ahead.get(now), plain.get(now))


def test_an_error_while_prefetching_surfaces_when_the_image_is_asked_for(tmp_path):
    (tmp_path / "broken.png").write_bytes(b"no image")
    save_noise(tmp_path / "good.png")
    broken, good = camera_for(tmp_path / "broken.png"), camera_for(tmp_path / "good.png")
    with ImageStore() as store:
        store.prefetch(broken)
        store.get(good)
        store.prefetch(good)
        with pytest.raises(UserError, match=r"broken\.png"):
            store.get(broken)
        with pytest.raises(UserError, match="has no image"):
            store.get(camera_for(None))


class PinnedByHand:
    """Stands for pinned memory, which a machine without a GPU does not have."""

    def __init__(self, monkeypatch, limit: int = 100) -> None:
        self.pinned, self.devices, self._limit = set(), [], limit
        monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: self._pin(tensor))
        monkeypatch.setattr(torch.Tensor, "is_pinned", lambda t: t.data_ptr() in self.pinned)
        monkeypatch.setattr(device, "make_current", self.devices.append)

    def _pin(self, tensor: torch.Tensor) -> torch.Tensor:
        if len(self.pinned) == self._limit:
            raise RuntimeError("cudaErrorMemoryAllocation")
        found = tensor.clone()
        self.pinned.add(found.data_ptr())
        return found


@pytest.fixture
def heap_trims(monkeypatch) -> list[int]:
    """An entry for each time that the heap is trimmed."""
    trims: list[int] = []
    monkeypatch.setattr(images, "trim_heap", lambda: trims.append(1))
    return trims


def noise_cameras(folder: Path, names: str) -> list[Camera]:
    """Cameras of photographs of noise, one for each letter."""
    cameras = []
    for name in names:
        save_noise(folder / f"{name}.png")
        cameras.append(camera_for(folder / f"{name}.png"))
    return cameras


def test_the_heap_is_trimmed_after_so_many_bytes(tmp_path, monkeypatch, heap_trims):
    cameras = noise_cameras(tmp_path, "abcde")
    with ImageStore() as store:
        monkeypatch.setattr(images, "_TRIM_BYTES", 2 * store.get(cameras[0]).nbytes)
        for camera in (*cameras, *cameras):
            store.get(camera)
    assert len(heap_trims) == 2


def test_small_views_of_large_photographs_count_as_what_their_decoder_holds(
    tmp_path, monkeypatch, heap_trims
):
    cameras = noise_cameras(tmp_path, "abcd")
    width = cameras[0].width
    height = cameras[0].height
    monkeypatch.setattr(images, "_TRIM_BYTES", 2 * 3 * width * height)
    with ImageStore() as store:
        for camera in cameras:
            store.get(camera.resized(width // 2, height // 2))
    assert len(heap_trims) == 2


def test_for_a_gpu_photographs_are_decoded_into_pinned_memory(tmp_path, monkeypatch):
    cameras = []
    for name in "abc":
        save_noise(tmp_path / f"{name}.png")
        cameras.append(camera_for(tmp_path / f"{name}.png"))
    by_hand, gpu = PinnedByHand(monkeypatch), torch.device("cuda", 1)
    # Two are 2 x 144 bytes, but pinned memory comes in blocks of 256.
    with ImageStore(budget_bytes=2 * 256) as store, ImageStore() as plain:
        store.serve(gpu)
        store.prefetch(cameras[0])
        for camera in (*cameras, cameras[2]):
            found = store.get(camera)
            assert found.is_pinned()
            assert torch.equal(found, plain.get(camera))
        assert store.n_bytes == 2 * 256
        assert set(by_hand.devices) == {gpu}
        store.limit(300)
        assert store.n_bytes == 256
        store.serve(torch.device("cpu"))
        assert not store.get(cameras[0]).is_pinned()


def test_photographs_that_cannot_be_pinned_are_used_as_they_are(tmp_path, monkeypatch):
    pixels = save_noise(tmp_path / "a.png")
    PinnedByHand(monkeypatch, limit=0)
    with ImageStore() as store:
        store.serve(torch.device("cuda", 0))
        found = store.get(camera_for(tmp_path / "a.png"))
        assert not found.is_pinned()
        np.testing.assert_array_equal(found.numpy(), pixels)


def test_closing_lets_go_of_everything(tmp_path):
    save_noise(tmp_path / "a.png")
    store = ImageStore()
    store.prefetch(camera_for(tmp_path / "a.png"))
    store.get(camera_for(tmp_path / "a.png"))
    store.close()
    assert store.n_bytes == 0
    store.close()


@pytest.mark.parametrize(
    "rule",
    [SugarSize(resolution_factor=1e-30), SugarSize(resolution_factor=5e-324), VanillaSize(1e30)],
)
def test_sizes_that_nobody_means_are_refused(rule):
    with pytest.raises(UserError, match="a side has at most 65,536 px"):
        rule.target(64, 48)


def test_sizes_that_cannot_act_beside_a_factor_are_named():
    assert SugarSize(resolution_factor=2.0).messages == ()
    assert "no effect beside" in SugarSize(resolution_factor=2.0, img_size_limit=800).messages[0]
