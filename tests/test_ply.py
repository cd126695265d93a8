# SPDX-License-Identifier: Apache-2.0
"""Gaussian and point clouds as PLY."""

import numpy as np
import pytest
import torch
from plyfile import PlyData, PlyElement

from gaussian_splatting.core.cloud import GaussianCloud
from gaussian_splatting.formats.ply import (
    COLOR_NAMES,
    GAUSSIAN_PROPERTIES,
    read_gaussian_ply,
    read_point_ply,
    write_gaussian_ply,
    write_point_ply,
)
from sugar_utils.errors import UserError
from tests.support.golden import GOLDEN_DIR, load_golden

GOLDEN_PLY = GOLDEN_DIR / "case10_checkpoint_A/point_cloud/iteration_7000/point_cloud.ply"


def random_cloud(n: int = 7) -> GaussianCloud:
    draw = torch.Generator().manual_seed(0)
    shapes = [(n, 3), (n, 1, 3), (n, 15, 3), (n, 1), (n, 3), (n, 4)]
    return GaussianCloud(*(torch.randn(shape, generator=draw) for shape in shapes))


def assert_same(a: GaussianCloud, b: GaussianCloud) -> None:
    for name, tensor in a.tensors().items():
        assert torch.equal(tensor, b.tensors()[name]), name


def write_table(path, columns: dict[str, np.ndarray], **options) -> None:
    table = np.zeros(len(next(iter(columns.values()))), [(k, v.dtype) for k, v in columns.items()])
    for name, values in columns.items():
        table[name] = values
    PlyData([PlyElement.describe(table, "vertex")], **options).write(str(path))


def columns_of(path) -> dict[str, np.ndarray]:
    data = PlyData.read(str(path), mmap=False)["vertex"].data
    return {name: np.array(data[name]) for name in data.dtype.names}


def test_the_recorded_checkpoint_reads_as_the_recorded_model():
    case = load_golden("case02_raster_A")
    cloud = read_gaussian_ply(GOLDEN_PLY, pytest.fail)
    recorded = {
        "means": case["in_points"],
        "sh_dc": case["in_sh_coordinates_dc"],
        "sh_rest": case["in_sh_coordinates_rest"],
        "opacity_logits": case["in_all_densities"],
        "log_scales": case["in_scales"],
        "quats": case["in_quaternions"],
    }
    for name, tensor in cloud.tensors().items():
        assert tensor.dtype == torch.float32
        np.testing.assert_allclose(tensor.numpy(), recorded[name], rtol=1e-6, atol=1e-6)


def test_writing_reproduces_the_recorded_file_byte_for_byte(tmp_path):
    write_gaussian_ply(tmp_path / "a.ply", read_gaussian_ply(GOLDEN_PLY))
    assert (tmp_path / "a.ply").read_bytes() == GOLDEN_PLY.read_bytes()


def test_a_round_trip_keeps_every_bit_in_the_order_of_3dgs(tmp_path):
    cloud = random_cloud()
    write_gaussian_ply(tmp_path / "sub/a.ply", cloud)
    columns = columns_of(tmp_path / "sub/a.ply")
    assert tuple(columns) == GAUSSIAN_PROPERTIES
    assert len(GAUSSIAN_PROPERTIES) == 62
    assert all(values.dtype == np.dtype("<f4") for values in columns.values())
    np.testing.assert_array_equal(columns["f_rest_15"], cloud.sh_rest[:, 0, 1])
    np.testing.assert_array_equal(columns["f_rest_2"], cloud.sh_rest[:, 2, 0])
    assert not columns["nx"].any()
    assert_same(read_gaussian_ply(tmp_path / "sub/a.ply", pytest.fail), cloud)
    assert [p.name for p in (tmp_path / "sub").iterdir()] == ["a.ply"]


@pytest.mark.parametrize("options", [{"text": True}, {"byte_order": ">"}, {"byte_order": "<"}])
def test_order_types_extras_and_encoding_do_not_matter(tmp_path, options):
    cloud = random_cloud()
    write_gaussian_ply(tmp_path / "a.ply", cloud)
    columns = {k: v for k, v in columns_of(tmp_path / "a.ply").items() if not k.startswith("n")}
    shuffled = {name: columns[name].astype(np.float64) for name in sorted(columns, reverse=True)}
    shuffled["segment"] = np.arange(7, dtype=np.int32)
    write_table(tmp_path / "b.ply", shuffled, **options)
    assert_same(read_gaussian_ply(tmp_path / "b.ply", pytest.fail), cloud)


def test_another_element_may_stand_before_the_gaussians(tmp_path):
    cloud = random_cloud()
    write_gaussian_ply(tmp_path / "a.ply", cloud)
    vertices = PlyData.read(str(tmp_path / "a.ply"))["vertex"]
    others = PlyElement.describe(np.zeros(3, [("a", "f4"), ("b", "i4")]), "camera")
    PlyData([others, vertices]).write(str(tmp_path / "b.ply"))
    assert_same(read_gaussian_ply(tmp_path / "b.ply", pytest.fail), cloud)


@pytest.mark.parametrize("degree", [0, 1, 2])
def test_lower_degrees_are_padded_with_zeros(tmp_path, degree):
    cloud = random_cloud()
    n_bands = (degree + 1) ** 2 - 1
    write_gaussian_ply(tmp_path / "a.ply", cloud)
    columns = columns_of(tmp_path / "a.ply")
    columns = {k: v for k, v in columns.items() if not k.startswith("f_rest")}
    for channel in range(3):
        for band in range(n_bands):
            values = cloud.sh_rest[:, band, channel].numpy()
            columns[f"f_rest_{channel * n_bands + band}"] = values
    write_table(tmp_path / "b.ply", columns)
    read = read_gaussian_ply(tmp_path / "b.ply")
    assert read.sh_rest.shape == (7, 15, 3)
    assert torch.equal(read.sh_rest[:, :n_bands], cloud.sh_rest[:, :n_bands])
    assert not read.sh_rest[:, n_bands:].any()


def test_bad_rows_and_rows_without_a_rotation_are_dropped(tmp_path):
    cloud = random_cloud()
    cloud.quats[2] = 0
    cloud.means[3, 1] = float("nan")
    cloud.log_scales[5, 2] = float("inf")
    write_gaussian_ply(tmp_path / "a.ply", cloud)
    messages = []
    read = read_gaussian_ply(tmp_path / "a.ply", messages.append)
    assert len(messages) == 2
    assert "dropped 1 of 7 Gaussians without a rotation" in messages[0]
    assert "dropped 2 of 7" in messages[1]
    assert torch.equal(read.means, cloud.means[[0, 1, 4, 6]])


def test_sizes_beyond_float32_are_dropped(tmp_path):
    cloud = random_cloud()
    cloud.log_scales[1, 0] = 1e30
    write_gaussian_ply(tmp_path / "a.ply", cloud)
    messages = []
    read = read_gaussian_ply(tmp_path / "a.ply", messages.append)
    assert "dropped 1 of 7" in messages[0]
    assert read.activate().scales.isfinite().all()


def test_more_coefficients_than_there_are_move_no_other_column(tmp_path):
    cloud = random_cloud()
    write_gaussian_ply(tmp_path / "a.ply", cloud)
    vertices = PlyData.read(str(tmp_path / "a.ply"))["vertex"].data
    columns = {name: np.array(vertices[name]) for name in vertices.dtype.names}
    columns |= {name: np.full(7, 9.0) for name in ("f_dc_3", "scale_3", "rot_4")}
    write_table(tmp_path / "b.ply", columns)
    read = read_gaussian_ply(tmp_path / "b.ply")
    for name, values in read.tensors().items():
        assert torch.equal(values, cloud.tensors()[name]), name


def test_the_filter_of_mip_splatting_is_fused(tmp_path):
    cloud = random_cloud()
    write_gaussian_ply(tmp_path / "a.ply", cloud)
    filters = np.linspace(0, 2, 7).astype(np.float32)
    write_table(tmp_path / "b.ply", columns_of(tmp_path / "a.ply") | {"filter_3D": filters})
    messages = []
    read = read_gaussian_ply(tmp_path / "b.ply", messages.append)
    assert "filter" in messages[0]
    before, after = cloud.activate(), read.activate()
    f = torch.from_numpy(filters)[:, None]
    torch.testing.assert_close(after.scales, (before.scales**2 + f**2).sqrt())
    ratio = (before.scales**2).prod(-1) / (before.scales**2 + f**2).prod(-1)
    torch.testing.assert_close(after.opacities, before.opacities * ratio.sqrt())
    assert torch.equal(read.opacity_logits[0], cloud.opacity_logits[0])


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.999])
def test_truncated_files_are_named(tmp_path, share):
    write_gaussian_ply(tmp_path / "a.ply", random_cloud())
    data = (tmp_path / "a.ply").read_bytes()
    (tmp_path / "a.ply").write_bytes(data[: int(len(data) * share)])
    with pytest.raises(UserError, match=r"a\.ply"):
        read_gaussian_ply(tmp_path / "a.ply")


def test_headers_that_lie_are_named(tmp_path):
    write_gaussian_ply(tmp_path / "a.ply", random_cloud())
    good = (tmp_path / "a.ply").read_bytes()
    for old, new in (
        (b"vertex 7", b"vertex 99999999999999"),
        (b"vertex 7", b"vertex -7"),
        (b"vertex 7", b"edge 7"),
        (b"float x", b"flout x"),
        (b"ply", b"\xff\xfe\xfd"),
    ):
        (tmp_path / "a.ply").write_bytes(good.replace(old, new, 1))
        with pytest.raises(UserError, match=r"a\.ply"):
            read_gaussian_ply(tmp_path / "a.ply")


@pytest.mark.parametrize(
    ("drop", "message"),
    [
        (("opacity",), "lacks the properties opacity"),
        (("scale_2",), "2D Gaussian"),
        (("f_rest_44",), r"44 properties f_rest_\*"),
        (("f_dc_0", "f_dc_1", "f_dc_2"), "f_dc_0, f_dc_1, f_dc_2"),
    ],
)
def test_missing_properties_are_listed(tmp_path, drop, message):
    write_gaussian_ply(tmp_path / "a.ply", random_cloud())
    columns = {k: v for k, v in columns_of(tmp_path / "a.ply").items() if k not in drop}
    write_table(tmp_path / "b.ply", columns)
    with pytest.raises(UserError, match=message):
        read_gaussian_ply(tmp_path / "b.ply")


def write_with_list(path, columns, name):
    """Write a PLY of which one property, an array of arrays, is a list."""
    table = np.empty(len(columns[name]), dtype=[(k, v.dtype) for k, v in columns.items()])
    for key, values in columns.items():
        table[key] = values
    element = PlyElement.describe(table, "vertex", val_types={name: "f4"}, len_types={name: "u1"})
    PlyData([element]).write(str(path))


@pytest.mark.parametrize("name", ["x", "opacity", "rot_3", "f_rest_3", "filter_3D"])
def test_a_property_that_is_a_list_is_named(tmp_path, name):
    write_gaussian_ply(tmp_path / "a.ply", random_cloud())
    columns = columns_of(tmp_path / "a.ply")
    n = len(next(iter(columns.values())))
    columns[name] = np.array([np.zeros(2, np.float32)] * n + [None], dtype=object)[:-1]
    write_with_list(tmp_path / "b.ply", columns, name)
    with pytest.raises(UserError, match=f"b.ply: {name} is a list"):
        read_gaussian_ply(tmp_path / "b.ply")


@pytest.mark.parametrize("name", ["y", "green"])
def test_a_list_in_a_point_cloud_is_named(tmp_path, name):
    columns = dict.fromkeys(["x", "y", "z"], np.zeros(2, np.float32))
    columns |= dict.fromkeys(["red", "green", "blue"], np.zeros(2, np.uint8))
    columns[name] = np.array([np.zeros(2, np.float32), np.zeros(3, np.float32)], dtype=object)
    write_with_list(tmp_path / "b.ply", columns, name)
    with pytest.raises(UserError, match=f"b.ply: {name} is a list"):
        read_point_ply(tmp_path / "b.ply")


@pytest.mark.parametrize(
    "names", [*COLOR_NAMES, ("Red", "Green", "Blue")], ids=lambda names: names[0]
)
def test_colours_by_other_names(tmp_path, names):
    places = dict.fromkeys(["X", "Y", "Z"], np.ones(2, np.float32))
    colors = {name: np.array([k, 7], np.uint8) for k, name in enumerate(names)}
    write_table(tmp_path / "a.ply", places | colors)
    points, read_colors = read_point_ply(tmp_path / "a.ply", pytest.fail)
    np.testing.assert_array_equal(points, np.ones((2, 3)))
    np.testing.assert_array_equal(read_colors, [[0, 1, 2], [7, 7, 7]])


def test_empty_absent_and_point_clouds_are_refused(tmp_path):
    write_gaussian_ply(tmp_path / "empty.ply", random_cloud(0))
    with pytest.raises(UserError, match="no Gaussians"):
        read_gaussian_ply(tmp_path / "empty.ply")
    with pytest.raises(UserError, match="no such file"):
        read_gaussian_ply(tmp_path / "absent.ply")
    write_point_ply(tmp_path / "points.ply", np.zeros((2, 3)), np.zeros((2, 3), np.uint8))
    with pytest.raises(UserError, match="point cloud, not Gaussians"):
        read_gaussian_ply(tmp_path / "points.ply")


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    write_gaussian_ply(tmp_path / "a.ply", random_cloud())
    before = (tmp_path / "a.ply").read_bytes()

    def fail(_self, path):
        with open(path, "wb") as file:
            file.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(PlyData, "write", fail)
    with pytest.raises(UserError, match="No space left"):
        write_gaussian_ply(tmp_path / "a.ply", random_cloud(3))
    assert (tmp_path / "a.ply").read_bytes() == before
    assert len(list(tmp_path.iterdir())) == 1


def test_points_come_back_as_written(tmp_path):
    rng = np.random.default_rng(0)
    points = rng.normal(size=(9, 3)).astype(np.float32)
    colors = rng.integers(0, 256, (9, 3), dtype=np.uint8)
    write_point_ply(tmp_path / "a.ply", points, colors)
    columns = columns_of(tmp_path / "a.ply")
    assert list(columns) == ["x", "y", "z", "nx", "ny", "nz", "red", "green", "blue"]
    assert columns["red"].dtype == np.uint8
    read, read_colors = read_point_ply(tmp_path / "a.ply", pytest.fail)
    np.testing.assert_array_equal(read, points)
    np.testing.assert_array_equal(read_colors, colors)


def test_points_without_normals_with_float_or_no_colours(tmp_path):
    xyz = {name: np.array([0.0, 1.0, np.nan]) for name in "xyz"}
    shades = {name: np.array([0.0, 0.5, 1.0], np.float32) for name in ("red", "green", "blue")}
    messages = []
    write_table(tmp_path / "a.ply", xyz | shades)
    points, colors = read_point_ply(tmp_path / "a.ply", messages.append)
    np.testing.assert_array_equal(points, [[0, 0, 0], [1, 1, 1]])
    np.testing.assert_array_equal(colors[:, 0], [0, 128])
    write_table(tmp_path / "b.ply", xyz)
    assert (read_point_ply(tmp_path / "b.ply", messages.append)[1] == 128).all()
    assert len(messages) == 3
    write_table(tmp_path / "c.ply", {"x": np.zeros(2)})
    with pytest.raises(UserError, match="lacks the properties y, z"):
        read_point_ply(tmp_path / "c.ply")


def test_lack_of_memory_is_not_blamed_on_the_file(tmp_path, monkeypatch):
    path = tmp_path / "cloud.ply"
    write_gaussian_ply(path, random_cloud())

    def fail(*_, **__):
        raise MemoryError

    monkeypatch.setattr("gaussian_splatting.formats.ply.PlyData.read", fail)
    with pytest.raises(UserError, match="out of memory reading its") as caught:
        read_gaussian_ply(path)
    assert "damaged" not in str(caught.value)


def test_header_that_asks_for_the_impossible_is_a_damaged_file(tmp_path):
    path = tmp_path / "cloud.ply"
    write_gaussian_ply(path, random_cloud())
    whole = path.read_bytes()
    path.write_bytes(whole.replace(b"element vertex 7", b"element vertex 99999999999999"))
    with pytest.raises(UserError, match=r"damaged|cannot be read as PLY"):
        read_gaussian_ply(path)
