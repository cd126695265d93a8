# SPDX-License-Identifier: Apache-2.0
"""Compact files of Gaussians: what their public descriptions say, byte by byte, and back."""

from __future__ import annotations

import gzip
import json
import struct
import zipfile
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from gaussian_splatting.core.cloud import GaussianCloud
from gaussian_splatting.core.moved import GLB_AXES, moved_cloud
from gaussian_splatting.formats.fidelity import fidelity
from gaussian_splatting.formats.packing import from_smallest_three, shares, smallest_three
from gaussian_splatting.formats.ply import write_gaussian_ply
from gaussian_splatting.formats.sog import write_sog
from gaussian_splatting.formats.splat_file import write_splat
from gaussian_splatting.formats.spz import write_spz
from gaussian_splatting.scenes.reference_layout import load_reference_checkpoint
from sugar_extractors.export.gltf_gaussians import (
    EXTENSION,
    read_gltf_gaussians,
    write_gltf_gaussians,
)
from sugar_extractors.export.reading import has_gaussians, read_gaussians_in_scene
from sugar_extractors.export.usd.gaussians import read_usd_gaussians, write_usd_gaussians
from sugar_utils.errors import UserError

WRITERS = {
    "a.spz": write_spz,
    "b.spz": partial(write_spz, version=4),
    "a.splat": write_splat,
    "a.gltf.glb": write_gltf_gaussians,
    "a.usd": write_usd_gaussians,
    "a.sog": write_sog,
}


def random_cloud(n: int = 600, seed: int = 0) -> GaussianCloud:
    rng = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=rng)

    return GaussianCloud(
        means=normal(n, 3) * 2,
        sh_dc=normal(n, 1, 3).clamp(-1.7, 1.7),
        sh_rest=(normal(n, 15, 3) * 0.2).clamp(-0.9, 0.9),
        opacity_logits=normal(n, 1) * 3,
        log_scales=normal(n, 3).clamp(-2, 2) - 4,
        quats=normal(n, 4) * 3,
    )


def one_gaussian() -> GaussianCloud:
    """At (1, 2, 3), grey, half opaque, of size 1, turned by 90 degrees about x."""
    rest = torch.zeros(1, 15, 3)
    rest[0, 0, 0] = 0.5
    return GaussianCloud(
        means=torch.tensor([[1.0, 2.0, 3.0]]),
        sh_dc=torch.zeros(1, 1, 3),
        sh_rest=rest,
        opacity_logits=torch.zeros(1, 1),
        log_scales=torch.zeros(1, 3),
        quats=torch.tensor([[1.0, 1.0, 0.0, 0.0]]),
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "position", "scale", "rotation", "color", "opacity", "harmonics"),
    [
        ("a.spz", 2e-6, 0.033, 0.3, 3.7, 0.51, 0.05),
        ("b.spz", 2e-6, 0.033, 0.3, 3.7, 0.51, 0.05),
        ("a.splat", 1e-7, 1e-5, 0.8, 0.51, 0.51, 0.21),
        ("a.gltf.glb", 1e-6, 1e-6, 0.05, 1e-4, 0.26, 1e-6),
        ("a.sog", 3e-4, 0.04, 0.8, 3.0, 0.51, 0.01),
        ("a.usd", 1e-6, 1e-6, 0.05, 1e-4, 0.26, 1e-6),
    ],
)
def test_what_is_read_is_what_was_written(
    name, position, scale, rotation, color, opacity, harmonics, tmp_path
):
    cloud = random_cloud()
    order = WRITERS[name](tmp_path / name, cloud)
    assert order is None or sorted(order.tolist()) == list(range(len(cloud)))
    assert has_gaussians(tmp_path / name)
    found = read_gaussians_in_scene(tmp_path / name, lambda _: None)
    written = cloud if order is None else cloud.select(torch.from_numpy(order))
    # SPZ, GLB and USD have other axes than a capture, and are turned when they are read.
    y_up = name.endswith((".spz", ".glb", ".usd"))
    errors = fidelity(moved_cloud(written, GLB_AXES) if y_up else written, found)
    assert errors.position < position
    assert errors.scale < scale
    assert errors.rotation < rotation
    assert errors.color < color
    assert errors.opacity < opacity
    assert errors.harmonics < harmonics
    assert errors.typical is not None
    assert 0 <= errors.typical.position <= errors.position
    assert "largest errors: position" in errors.line()
    assert "typical ones (median): position" in errors.line()


@pytest.mark.parametrize("name", WRITERS)
def test_the_same_gaussians_give_the_same_bytes(name, tmp_path):
    WRITERS[name](tmp_path / name, random_cloud())
    first = (tmp_path / name).read_bytes()
    WRITERS[name](tmp_path / name, random_cloud())
    assert (tmp_path / name).read_bytes() == first


@pytest.mark.parametrize("name", WRITERS)
def test_no_gaussians_are_one_line(name, tmp_path):
    nothing = random_cloud(0)
    with pytest.raises(UserError, match=f"{name}: there are no Gaussians to write"):
        WRITERS[name](tmp_path / name, nothing)
    assert not (tmp_path / name).exists()


@pytest.mark.parametrize("name", ["a.spz", "b.spz", "a.splat", "a.sog", "a.ply"])
def test_a_file_of_gaussians_is_a_checkpoint(name, tmp_path):
    """It is read in the axes of the capture."""
    cloud = random_cloud()
    if name == "a.ply":
        write_gaussian_ply(tmp_path / name, cloud)
        order = None
    else:
        y_up = name.endswith(".spz")
        order = WRITERS[name](tmp_path / name, moved_cloud(cloud, GLB_AXES) if y_up else cloud)
    found = load_reference_checkpoint(tmp_path / name).read_cloud(pytest.fail)
    written = cloud if order is None else cloud.select(torch.from_numpy(order))
    assert fidelity(written, found).position < 3e-4
    assert fidelity(written, found).rotation < 0.8
    with pytest.raises(UserError, match="no such file"):
        load_reference_checkpoint(tmp_path / f"absent-{name}")


def test_a_file_that_is_no_checkpoint_says_how_to_make_one(tmp_path):
    write_gltf_gaussians(tmp_path / "a.glb", random_cloud())
    checkpoint = load_reference_checkpoint(tmp_path / "a.glb")
    with pytest.raises(UserError, match=r"not one of .ply, .spz, .sog, .splat; .* --to ply"):
        checkpoint.read_cloud(pytest.fail)


SLOW_TO_READ = ("a.usd",)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n in SLOW_TO_READ)) for n in WRITERS]
)
def test_a_damaged_file_is_one_line(name, tmp_path):
    path = tmp_path / name
    with pytest.raises(UserError):
        read_gaussians_in_scene(path, lambda _: None)
    WRITERS[name](path, random_cloud())
    whole = path.read_bytes()
    # A ``.splat`` that ends between two rows is whole.
    for length in (0, 7, 100, len(whole) // 2 + 1, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(UserError, match=name) as caught:
            read_gaussians_in_scene(path, lambda _: None)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("part", "number"), [("scales", 1e30), ("sh0", 1e300)])
def test_numbers_beyond_float32_are_refused(tmp_path, part, number):
    path = tmp_path / "a.sog"
    write_sog(path, random_cloud())
    with zipfile.ZipFile(path) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    meta = json.loads(files["meta.json"])
    meta[part]["codebook"] = [number] * 256
    files["meta.json"] = json.dumps(meta).encode()
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    with pytest.raises(UserError, match="a.sog: holds no Gaussians: .* numbers that make no sense"):
        read_gaussians_in_scene(path, pytest.fail)


def test_spz_has_the_bytes_of_its_description(tmp_path):
    write_spz(tmp_path / "a.spz", moved_cloud(one_gaussian(), GLB_AXES))
    content = gzip.decompress((tmp_path / "a.spz").read_bytes())
    magic, version, n, degree, bits, flags, reserved = struct.unpack("<IIIBBBB", content[:16])
    assert (magic, version, n, degree, flags, reserved) == (0x5053474E, 3, 1, 3, 0, 0)
    assert content[:4] == b"NGSP"
    # Right, up, back: y and z change their signs.
    fixed = [int.from_bytes(content[k : k + 3], "little", signed=True) for k in (16, 19, 22)]
    assert [value / (1 << bits) for value in fixed] == [1, -2, -3]
    assert bits == 20
    assert content[25] in (127, 128)
    assert list(content[26:29]) == [128] * 3
    assert list(content[29:32]) == [160] * 3
    # A quarter turn after half a turn about x: three quarters, (x, y, z, w) = (s, 0, 0, -s) or its
    # negative. The largest of equals is the first; its sign is made positive, so w is negative.
    (packed,) = struct.unpack("<I", content[32:36])
    assert packed >> 30 in (0, 3)
    last = packed & 0x3FF if packed >> 30 == 0 else packed >> 20 & 0x3FF
    assert last & 0x1FF == 511
    assert last >> 9 == 1
    # Band 1 is (y, z, x): the coefficient of y changes its sign with it; its steps are 8 wide.
    assert content[36] == 64
    assert list(content[37:81]) == [128] * 44
    assert len(content) == 81


def test_splat_has_the_bytes_of_its_description(tmp_path):
    small = one_gaussian()
    small.log_scales = small.log_scales - 2
    both = GaussianCloud(
        **{
            name: torch.cat([tensor, small.tensors()[name]])
            for name, tensor in one_gaussian().tensors().items()
        }
    )
    both.means[1] = 7.0
    # What covers more comes first.
    assert write_splat(tmp_path / "a.splat", both.select(torch.tensor([1, 0]))).tolist() == [1, 0]
    content = (tmp_path / "a.splat").read_bytes()
    assert len(content) == 64
    assert struct.unpack("<6f", content[:24]) == (1, 2, 3, 1, 1, 1)
    assert list(content[24:28]) == [128] * 4
    assert list(content[28:32]) == [219, 219, 128, 128]
    assert struct.unpack("<3f", content[32:44]) == (7, 7, 7)


def test_quaternions_come_back_from_their_three_smallest_parts():
    quats = np.random.default_rng(0).normal(size=(500, 4))
    largest, three = smallest_three(quats)
    assert np.abs(three).max() <= np.sqrt(0.5) + 1e-12
    unit = quats / np.linalg.norm(quats, axis=1, keepdims=True)
    again = from_smallest_three(largest, three)
    np.testing.assert_allclose(np.abs((again * unit).sum(axis=1)), 1, atol=1e-12)


def test_shares_reach_both_ends():
    assert shares(np.array([-1.0, 0.0, 0.5, 1.0, 2.0]), 10).tolist() == [0, 0, 512, 1023, 1023]


def test_a_gltf_has_what_its_extension_asks_for(tmp_path):
    path = tmp_path / "a.glb"
    write_gltf_gaussians(path, one_gaussian())
    content, binary = parts_of(path)
    assert struct.unpack_from("<I", path.read_bytes(), 8)[0] == path.stat().st_size
    assert content["buffers"][0]["byteLength"] == len(binary)
    assert EXTENSION in content["extensionsUsed"]
    (primitive,) = content["meshes"][0]["primitives"]
    assert primitive["mode"] == 0
    assert primitive["extensions"][EXTENSION]["kernel"] == "ellipse"
    assert primitive["extensions"][EXTENSION]["colorSpace"] == "srgb_rec709_display"
    names = primitive["attributes"]

    def value(name: str) -> list[float]:
        accessor = content["accessors"][names[name]]
        start = content["bufferViews"][accessor["bufferView"]]["byteOffset"]
        if accessor["componentType"] == 5121:
            assert accessor["normalized"]
            return list(binary[start : start + 4])
        width = {"SCALAR": 1, "VEC3": 3, "VEC4": 4}[accessor["type"]]
        return list(struct.unpack_from(f"<{width}f", binary, start))

    assert value("POSITION") == [1, 2, 3]
    assert value(f"{EXTENSION}:ROTATION") == pytest.approx([0.5**0.5, 0, 0, 0.5**0.5])
    assert value(f"{EXTENSION}:SCALE") == [1, 1, 1]
    assert value(f"{EXTENSION}:OPACITY") == [0.5]
    assert value(f"{EXTENSION}:SH_DEGREE_0_COEF_0") == [0, 0, 0]
    assert value(f"{EXTENSION}:SH_DEGREE_1_COEF_0") == [0.5, 0, 0]
    assert value(f"{EXTENSION}:SH_DEGREE_3_COEF_6") == [0, 0, 0]
    # Half of the screen's range is 0.214 of its light.
    assert value("COLOR_0") == [55, 55, 55, 128]


def test_a_program_that_does_not_know_the_extension_shows_points(tmp_path):
    trimesh = pytest.importorskip("trimesh")
    cloud = random_cloud()
    write_gltf_gaussians(tmp_path / "a.glb", cloud)
    (points,) = trimesh.load(tmp_path / "a.glb").geometry.values()
    np.testing.assert_allclose(points.vertices, cloud.means.numpy(), atol=1e-6)


def changed_gltf(path: Path, **replaced: tuple[np.ndarray, dict]) -> None:
    """Write anew, with other arrays and fields of their accessors; without an array: left out."""
    content, binary = parts_of(path)
    names = content["meshes"][0]["primitives"][0]["attributes"]
    for name, (values, fields) in replaced.items():
        name = f"{EXTENSION}:{name}"
        if values is None:
            del names[name]
            continue
        accessor = content["accessors"][names[name]]
        view = {"buffer": 0, "byteOffset": len(binary), "byteLength": values.nbytes}
        stride = {"byteStride": fields.pop("byteStride")} if "byteStride" in fields else {}
        accessor.update(bufferView=len(content["bufferViews"]), **fields)
        content["bufferViews"].append(view | stride)
        binary += values.tobytes()
    write_parts(path, content, binary)


def parts_of(path: Path) -> tuple[dict, bytes]:
    """The JSON of a GLB, and its binary part."""
    file = path.read_bytes()
    length = struct.unpack_from("<I", file, 12)[0]
    return json.loads(file[20 : 20 + length]), file[28 + length :]


def write_parts(path: Path, content: dict, binary: bytes) -> None:
    text = json.dumps(content).encode()
    text += b" " * (-len(text) % 4)
    head = struct.pack("<4sIIII", b"glTF", 2, 28 + len(text) + len(binary), len(text), 0x4E4F534A)
    path.write_bytes(head + text + struct.pack("<II", len(binary), 0x004E4942) + binary)


def test_a_gltf_of_another_program_may_be_packed_in_bytes_and_shorts(tmp_path):
    path, cloud = tmp_path / "a.glb", random_cloud(50)
    write_gltf_gaussians(path, cloud)
    quats = torch.nn.functional.normalize(cloud.quats).roll(-1, dims=1).numpy()
    scales, opacities = cloud.log_scales.exp().numpy(), cloud.opacity_logits.sigmoid().numpy()
    wide = np.zeros((50, 8), np.uint16)
    wide[:, :3] = np.rint(scales * 65535)
    rest = {f"SH_DEGREE_{d}_COEF_{k}": (None, {}) for d in (2, 3) for k in range(2 * d + 1)}
    changed_gltf(
        path,
        ROTATION=(
            np.rint(quats * 32767).astype("<i2"),
            {"componentType": 5122, "normalized": True},
        ),
        SCALE=(wide, {"componentType": 5123, "normalized": True, "byteStride": 16}),
        OPACITY=(
            np.rint(opacities * 255).astype("u1"),
            {"componentType": 5121, "normalized": True},
        ),
        **rest,
    )
    found = read_gltf_gaussians(path)
    torch.testing.assert_close(found.sh_rest[:, :3], cloud.sh_rest[:, :3])
    assert not found.sh_rest[:, 3:].any()
    cloud.sh_rest[:, 3:] = 0
    errors = fidelity(cloud, found)
    assert errors.scale < 1e-2
    assert errors.rotation < 0.1
    assert errors.opacity < 0.51


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"SH_DEGREE_2_COEF_1": (None, {})}, "SH_DEGREE_2_COEF_1"),
        ({"SCALE": (np.ones((600, 3), "<u4"), {"componentType": 5125})}, "5125"),
        ({"SCALE": (-np.ones((600, 3), "<f4"), {})}, "make no sense"),
        ({"ROTATION": (np.ones((600, 3), "<f4"), {"type": "VEC3"})}, "other types or lengths"),
        ({"OPACITY": (np.ones((9, 1), "<f4"), {"count": 600})}, "buffer"),
        ({"kernel": "other"}, "not of kernel ellipse"),
        ({"colorSpace": "lin_rec709_display"}, "colour space srgb_rec709_display"),
        ({"scale": [1, 2, 1]}, "stretched"),
        ({"scale": [0, 0, 0]}, "flattened"),
        ({"translation": [1e300, 0, 0]}, "numbers beyond"),
        ({"translation": [float("nan"), 0, 0]}, "numbers beyond"),
        ({"rotation": [0, 0, 0, 0]}, "norm"),
        ({"matrix": [1, 2, 3]}, "reshape"),
        ({"children": [0]}, "hang on each other"),
    ],
)
def test_what_a_gltf_says_otherwise_is_one_line(change, message, tmp_path):
    path = tmp_path / "a.glb"
    write_gltf_gaussians(path, random_cloud())
    if isinstance(next(iter(change.values())), tuple):
        changed_gltf(path, **change)
    else:
        content, binary = parts_of(path)
        own = content["meshes"][0]["primitives"][0]["extensions"][EXTENSION]
        is_kernel = set(change) & {"kernel", "colorSpace"}
        (own if is_kernel else content["nodes"][0]).update(change)
        write_parts(path, content, binary)
    with pytest.raises(UserError, match=message) as caught:
        read_gltf_gaussians(path)
    assert "\n" not in str(caught.value)


def test_gaussians_of_gltf_are_read_where_their_nodes_are(tmp_path):
    path = tmp_path / "a.glb"
    write_gltf_gaussians(path, random_cloud())
    resting = read_gltf_gaussians(path)
    content, binary = parts_of(path)
    content["nodes"][0] |= {"translation": [1, 0, 0], "scale": [2, 2, 2]}
    half = 0.5**0.5
    content["nodes"].append({"rotation": [0, 0, half, half], "children": [0]})
    upward = np.eye(4)
    upward[2, 3] = 5
    columns = upward.T.ravel().tolist()
    content["nodes"].append({"matrix": columns, "children": [1]})
    write_parts(path, content, binary)
    expected = np.array([[0, -2, 0, 0], [2, 0, 0, 1], [0, 0, 2, 5], [0, 0, 0, 1.0]])
    found = read_gltf_gaussians(path)
    for name, values in moved_cloud(resting, expected).tensors().items():
        torch.testing.assert_close(found.tensors()[name], values, atol=1e-5, rtol=1e-4)
    # Coordinates of a map have no digits left for a scan in float32.
    content["nodes"][2]["matrix"][12:15] = [500_000, 0, -5_000_000]
    write_parts(path, content, binary)
    lines = []
    far = read_gltf_gaussians(path, lines.append)
    expected[:3, 3] = 0
    torch.testing.assert_close(far.means, moved_cloud(resting, expected).means)
    assert len(lines) == 1
    assert "translation (500000.000000, 1.000000, -5000000.000000) left out" in lines[0]


def test_spz_4_has_the_bytes_of_its_description(tmp_path):
    zstandard = pytest.importorskip("zstandard")
    write_spz(tmp_path / "3.spz", one_gaussian())
    write_spz(tmp_path / "4.spz", one_gaussian(), version=4)
    old = gzip.decompress((tmp_path / "3.spz").read_bytes())
    content = (tmp_path / "4.spz").read_bytes()
    assert content[:4] == b"NGSP"
    assert struct.unpack_from("<IIBBBBI12s", content, 4) == (4, 1, 3, 20, 0, 6, 32, bytes(12))
    place, parts = 32 + 16 * 6, []
    for row in range(6):
        size, unpacked = struct.unpack_from("<QQ", content, 32 + 16 * row)
        parts.append(zstandard.decompress(content[place : place + size]))
        assert len(parts[-1]) == unpacked
        place += size
    assert place == len(content)
    assert b"".join(parts) == old[16:]


def test_spz_of_degree_4_or_of_sizes_that_cannot_be(tmp_path):
    path = tmp_path / "a.spz"
    write_spz(path, one_gaussian())
    content = gzip.decompress(path.read_bytes())
    more = content[:12] + b"\4" + content[13:] + bytes([128]) * 27
    path.write_bytes(gzip.compress(more))
    assert read_gaussians_in_scene(path, lambda _: None).sh_rest.shape == (1, 15, 3)
    write_spz(path, one_gaussian(), version=4)
    large = bytearray(path.read_bytes())
    large[40:48] = struct.pack("<Q", 1 << 60)
    path.write_bytes(large)
    with pytest.raises(UserError, match="sizes that cannot be"):
        read_gaussians_in_scene(path, lambda _: None)


def test_sog_has_the_images_of_its_description(tmp_path):
    from PIL import Image

    write_sog(tmp_path / "a.sog", one_gaussian())
    with zipfile.ZipFile(tmp_path / "a.sog") as archive:
        meta = json.loads(archive.read("meta.json"))
        assert (meta["version"], meta["count"], meta["antialias"]) == (2, 1, False)
        sizes, texels = {}, {}
        for name in archive.namelist():
            if name.endswith(".webp"):
                assert archive.read(name)[12:16] == b"VP8L", "lossless"
                with Image.open(archive.open(name)) as image:
                    sizes[name], texels[name] = image.size, np.asarray(image.convert("RGBA"))
    assert sizes.pop("shN_centroids.webp") == (64 * 15, 1)
    assert set(sizes.values()) == {(1, 1)}
    assert meta["means"]["mins"] == pytest.approx(np.log1p([1, 2, 3]).tolist())
    assert meta["means"]["files"] == ["means_l.webp", "means_u.webp"]
    # w and x are equal and the largest; the first of them is left out, and its place kept.
    assert texels["quats.webp"][0, 0].tolist() == [255, 128, 128, 252]
    red, green, blue, opacity = texels["sh0.webp"][0, 0]
    assert [meta["sh0"]["codebook"][row] for row in (red, green, blue)] == [0, 0, 0]
    assert opacity == 128
    coefficient = texels["shN_centroids.webp"][0, 0, 0]
    assert meta["shN"]["codebook"][coefficient] == pytest.approx(0.5)
    assert meta["shN"]["bands"] == 3


@pytest.mark.slow
def test_sog_without_view_dependent_colour_and_with_a_palette(tmp_path):
    cloud = random_cloud(100)
    cloud.sh_rest[:] = 0
    write_sog(tmp_path / "a.sog", cloud)
    with zipfile.ZipFile(tmp_path / "a.sog") as archive:
        assert "shN" not in json.loads(archive.read("meta.json"))
    assert not read_gaussians_in_scene(tmp_path / "a.sog", lambda _: None).sh_rest.any()
    # More Gaussians than colours: those that are alike share one.
    many = random_cloud(5000)
    many.sh_rest[:] = many.sh_rest[torch.arange(5000) % 50]
    write_sog(tmp_path / "b.sog", many)
    found = read_gaussians_in_scene(tmp_path / "b.sog", lambda _: None)
    assert (found.sh_rest - many.sh_rest).abs().mean() < 0.01


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 1}, "version 1, not 2"),
        ({"count": 700}, "hold no 700 Gaussians"),
        ({"count": 0}, "hold no 0 Gaussians"),
        ({"sh0": {"codebook": [1.0], "files": ["sh0.webp"]}}, "out of bounds"),
        ({"means": {"files": []}}, "no entry 'mins'"),
        ({"scales": {"codebook": [float("nan")] * 256, "files": ["scales.webp"]}}, "make no sense"),
        ({"quats": {"files": ["../meta.json"]}}, "no item named"),
    ],
)
def test_what_a_sog_says_otherwise_is_one_line(change, message, tmp_path):
    path = tmp_path / "a.sog"
    write_sog(path, random_cloud())
    with zipfile.ZipFile(path) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    files["meta.json"] = json.dumps(json.loads(files["meta.json"]) | change).encode()
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    with pytest.raises(UserError, match=message) as caught:
        read_gaussians_in_scene(path, lambda _: None)
    assert "\n" not in str(caught.value)


def test_usd_has_the_schema_of_gaussian_particle_fields(tmp_path):
    usd = pytest.importorskip("pxr.Usd")
    from pxr import UsdGeom, UsdValidation

    write_usd_gaussians(tmp_path / "a.usd", one_gaussian())
    stage = usd.Stage.Open(str(tmp_path / "a.usd"))
    prim = stage.GetDefaultPrim()
    assert prim.GetTypeName() == "ParticleField3DGaussianSplat"
    assert UsdGeom.GetStageUpAxis(stage) == "Y"
    assert list(prim.GetAttribute("positions").Get()[0]) == [1, 2, 3]
    turn = prim.GetAttribute("orientations").Get()[0]
    assert (turn.GetReal(), *turn.GetImaginary()) == pytest.approx((0.5**0.5, 0.5**0.5, 0, 0))
    assert list(prim.GetAttribute("scales").Get()[0]) == [1, 1, 1]
    assert prim.GetAttribute("opacities").Get()[0] == 0.5
    assert prim.GetAttribute("radiance:sphericalHarmonicsDegree").Get() == 3
    harmonics = prim.GetAttribute("radiance:sphericalHarmonicsCoefficients").Get()
    assert [list(row) for row in harmonics[:2]] == [[0, 0, 0], [0.5, 0, 0]]
    assert [list(row) for row in prim.GetAttribute("extent").Get()] == [[-2, -1, 0], [4, 5, 6]]
    every = UsdValidation.ValidationRegistry().GetOrLoadAllValidators()
    assert every
    assert not UsdValidation.ValidationContext(every).Validate(stage)


@pytest.mark.slow
def test_gaussians_of_usd_are_read_where_the_stage_places_them(tmp_path):
    usd = pytest.importorskip("pxr.Usd")
    from pxr import Gf, UsdGeom

    cloud = random_cloud(40)
    write_usd_gaussians(tmp_path / "a.usd", cloud)
    stage = usd.Stage.Open(str(tmp_path / "a.usd"))
    above = UsdGeom.Xform.Define(stage, "/Above")
    above.AddTranslateOp().Set(Gf.Vec3d(1, 2, 3))
    above.AddRotateZOp().Set(90.0)
    editor = usd.NamespaceEditor(stage)
    editor.MovePrimAtPath("/Gaussians", "/Above/Gaussians")
    editor.ApplyEdits()
    field = UsdGeom.Xformable(stage.GetPrimAtPath("/Above/Gaussians"))
    scale = field.AddScaleOp()
    scale.Set(Gf.Vec3f(2, 2, 2))
    UsdGeom.SetStageUpAxis(stage, UsdGeom.Tokens.z)
    stage.GetRootLayer().Export(str(tmp_path / "b.usda"))
    in_turn = np.array([[0, -2, 0, 1], [2, 0, 0, 2], [0, 0, 2, 3], [0, 0, 0, 1.0]])
    y_up = np.array([[1, 0, 0, 0], [0, 0, 1, 0], [0, -1, 0, 0], [0, 0, 0, 1.0]])
    expected = moved_cloud(read_usd_gaussians(tmp_path / "a.usd"), y_up @ in_turn)
    found = read_usd_gaussians(tmp_path / "b.usda")
    assert torch.allclose(found.means, expected.means, atol=1e-5)
    assert torch.allclose(found.log_scales, expected.log_scales, atol=1e-5)
    assert torch.allclose(found.sh_rest, expected.sh_rest, atol=1e-5)
    for name in ("means", "quats"):
        assert not torch.allclose(getattr(found, name), getattr(cloud, name), atol=0.1)
    scale.Set(Gf.Vec3f(2, 2, 3))
    stage.GetRootLayer().Export(str(tmp_path / "c.usda"))
    with pytest.raises(UserError, match="c.usda: its Gaussians are stretched") as caught:
        read_usd_gaussians(tmp_path / "c.usda")
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_usd_in_halves_is_read_and_one_without_gaussians_is_one_line(tmp_path):
    usd = pytest.importorskip("pxr.Usd")
    from pxr import Vt

    write_usd_gaussians(tmp_path / "a.usd", random_cloud(40))
    stage = usd.Stage.Open(str(tmp_path / "a.usd"))
    prim = stage.GetDefaultPrim()
    scales = np.array(prim.GetAttribute("scales").Get())
    prim.GetAttribute("scales").Clear()
    prim.GetAttribute("scalesh").Set(Vt.Vec3hArray.FromNumpy(scales.astype(np.float16)))
    stage.GetRootLayer().Export(str(tmp_path / "b.usda"))
    found = read_gaussians_in_scene(tmp_path / "b.usda", lambda _: None)
    np.testing.assert_allclose(found.log_scales.exp().numpy(), scales, rtol=1e-3)
    stage.RemovePrim("/Gaussians")
    stage.GetRootLayer().Export(str(tmp_path / "c.usd"))
    (tmp_path / "d.usd").write_text("no")
    for name in ("c.usd", "d.usd"):
        with pytest.raises(UserError, match=f"{name}: damaged, or no field") as caught:
            read_gaussians_in_scene(tmp_path / name, lambda _: None)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("version", [3, 4])
def test_another_reader_finds_in_an_spz_what_was_written(version, tmp_path):
    gsply = pytest.importorskip("gsply")
    cloud = random_cloud()
    # It leaves them in the axes of the format: x right, y up, z back.
    turned = moved_cloud(cloud, GLB_AXES)
    write_spz(tmp_path / "a.spz", turned, version)
    found = gsply.read_spz(tmp_path / "a.spz")
    read = GaussianCloud(
        means=torch.tensor(found.means),
        sh_dc=torch.tensor(found.sh0)[:, None],
        sh_rest=torch.tensor(found.shN).reshape(-1, 15, 3),
        opacity_logits=torch.tensor(found.opacities).reshape(-1, 1).clamp(-8, 8),
        log_scales=torch.tensor(found.scales),
        quats=torch.tensor(found.quats),
    )
    errors = fidelity(turned, read)
    assert errors.position < 2e-6
    assert errors.scale < 0.033
    assert errors.rotation < 0.3
    assert errors.color < 3.7
    assert errors.opacity < 0.6
    assert errors.harmonics < 0.05
