# SPDX-License-Identifier: Apache-2.0
"""Laser scans as points to start from and as depth maps."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import gaussian_splatting.train as vanilla_train
from gaussian_splatting.data.cameras import Camera
from gaussian_splatting.data.maps.depth_maps import DepthOptions
from gaussian_splatting.data.scans import scan_files
from gaussian_splatting.data.scans.scan_depths import depth_of_points, point_spacing
from gaussian_splatting.data.scans.scan_files import read_scan
from gaussian_splatting.data.scans.scan_frame import ScanFrame, scan_in_scene, without_offset
from gaussian_splatting.data.scans.voxel_grid import VoxelGrid
from gaussian_splatting.formats.ply import read_gaussian_ply, read_point_ply, write_point_ply
from gaussian_splatting.scenes.reference_layout import point_cloud_path
from gaussian_splatting.scenes.scene import VanillaSize, load_scene
from sugar_utils.errors import UserError
from tests.support import verbs
from tests.support.survey import EPSG, TO_MAP, list_lines, places, write_list
from tests.support.tiny_scene import TinyScene, make_tiny_scene, refusal, run_cli, tiny_cameras

SUFFIXES = (".las", ".laz", ".e57", ".ply")


def sphere(n: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Points on the unit sphere, (n, 3), and colours that follow from them, (n, 3) uint8."""
    points = np.random.default_rng(seed).normal(size=(n, 3))
    points /= np.linalg.norm(points, axis=1, keepdims=True)
    return points, np.rint(127.5 + 100 * points).astype(np.uint8)


def write_scan(path: Path, points: np.ndarray, colors: np.ndarray | None, epsg: int | None = None):
    """Write a scan as other programs do, by the libraries of the formats."""
    if path.suffix == ".ply":
        write_point_ply(path, points, np.zeros((len(points), 3)) if colors is None else colors)
    elif path.suffix == ".e57":
        pye57 = pytest.importorskip("pye57")
        data = {f"cartesian{axis}": points[:, index] for index, axis in enumerate("XYZ")}
        if colors is not None:
            for index, name in enumerate(("colorRed", "colorGreen", "colorBlue")):
                data[name] = colors[:, index]
        file = pye57.E57(str(path), mode="w")
        # A station that stands elsewhere, turned by 90 degrees.
        turn = np.array([np.sqrt(0.5), 0, 0, np.sqrt(0.5)])
        shift = np.round(points.mean(axis=0)) + [10.0, 20, 30]
        local = points - shift
        data["cartesianX"] = local[:, 1].copy()
        data["cartesianY"] = -local[:, 0]
        data["cartesianZ"] = local[:, 2].copy()
        file.write_scan_raw(data, rotation=turn, translation=shift)
        file.close()
    else:
        laspy = pytest.importorskip("laspy")
        header = laspy.LasHeader(point_format=1 if colors is None else 7, version="1.4")
        header.offsets = np.floor(points.min(axis=0)) if len(points) else np.zeros(3)
        header.scales = np.full(3, 1e-6)
        if epsg is not None:
            pyproj = pytest.importorskip("pyproj")
            header.add_crs(pyproj.CRS.from_epsg(epsg))
        las = laspy.LasData(header)
        las.xyz = points
        if colors is not None:
            for index, name in enumerate(("red", "green", "blue")):
                las[name] = colors[:, index].astype(np.uint16) * 257
        las.write(str(path))


def everything(positions: np.ndarray) -> np.ndarray:
    """Whether positions are of use: all are."""
    return np.ones(len(positions), bool)


def same(positions: np.ndarray) -> np.ndarray:
    """Positions in a world that is that of the file."""
    return positions


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_scans_are_read_with_colours_and_the_place_of_their_station(suffix, tmp_path):
    points, colors = sphere(500)
    path = tmp_path / f"scan{suffix}"
    write_scan(path, points, colors)
    scan = read_scan(path, 1000, [].append, same, everything)
    np.testing.assert_allclose(scan.positions, points, atol=2e-6)
    np.testing.assert_array_equal(scan.colors, colors)
    assert scan.has_colors


@pytest.mark.parametrize("suffix", [".las", ".e57"])
def test_scans_without_colours_are_grey(suffix, tmp_path):
    path = tmp_path / f"scan{suffix}"
    write_scan(path, sphere(50)[0], None)
    notes: list[str] = []
    scan = read_scan(path, 1000, notes.append, same, everything)
    assert not scan.has_colors
    assert (scan.colors == 128).all()
    assert "has no colours" in notes[0]


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_colours_that_are_all_zero_are_none(suffix, tmp_path):
    path = tmp_path / f"scan{suffix}"
    points, colors = sphere(50)
    write_scan(path, points, np.zeros_like(colors))
    notes: list[str] = []
    scan = read_scan(path, 1000, notes.append, same, everything)
    assert not scan.has_colors
    assert (scan.colors == 128).all()
    assert "has no colours" in notes[0]


def test_points_without_colours_stay_grey_beside_colours_of_16_bits(monkeypatch):
    points, colors = sphere(60)
    pieces = [
        scan_files._Piece(points[:20], None),
        scan_files._Piece(points[20:40], np.zeros((20, 3), np.uint16)),
        scan_files._Piece(points[40:], colors[40:].astype(np.uint16) * 257),
    ]
    monkeypatch.setattr(scan_files, "_pieces", lambda path: iter(pieces))
    scan = read_scan(Path("scan.e57"), 1000, [].append, same, everything)
    assert (scan.colors[:40] == 128).all()
    np.testing.assert_array_equal(scan.colors[40:], colors[40:])
    # Thinned to one point, only those with a colour tell it.
    scan = read_scan(Path("scan.e57"), 1, [].append, same, everything)
    expected = colors[40:].astype(float).mean(axis=0)
    np.testing.assert_allclose(scan.colors[0], expected, atol=1)


def test_many_points_are_thinned_evenly_and_to_their_means():
    points, colors = sphere(60_000)
    # Most of them lie on one side, as near a scanner.
    rows = np.concatenate([np.flatnonzero(points[:, 0] > 0.7)] * 4 + [np.arange(len(points))])
    grid = VoxelGrid(3_000)
    for piece in np.array_split(np.random.default_rng(1).permutation(rows), 9):
        grid.add(points[piece], colors[piece])
    positions, values = grid.points()
    assert 1_500 < len(positions) <= 3_000
    share = (positions[:, 0] > 0.7).mean()
    # The cap has 15 % of the sphere, and 43 % of the points.
    assert share == pytest.approx(0.15, abs=0.03)
    np.testing.assert_allclose(np.linalg.norm(positions, axis=1), 1, atol=grid.side**2)
    np.testing.assert_allclose(values, 127.5 + 100 * positions, atol=1)


@pytest.fixture(scope="module")
def scene(tmp_path_factory) -> TinyScene:
    return make_tiny_scene(tmp_path_factory.mktemp("scans") / "scene")


def train(scene: TinyScene, output: Path, *words: object) -> int:
    """Two iterations of a vanilla run; its exit code."""
    short = ("--iterations", 2, "--robust", "False", "--densification", "reference")
    return run_cli(vanilla_train.main, "-s", scene.root, "-m", output, *short, *words)


def test_a_run_starts_from_a_scan(scene, tmp_path):
    pytest.importorskip("laspy")
    points, colors = sphere(400)
    # Another building far away, which no photograph shows.
    far = points + [60, 0, 0]
    path = tmp_path / "scan.las"
    write_scan(path, np.concatenate([points, far]), np.concatenate([colors, colors]))
    assert train(scene, tmp_path / "out", "--init_ply", path) == 0
    cloud = read_gaussian_ply(point_cloud_path(tmp_path / "out", 2))
    np.testing.assert_allclose(cloud.means, points, atol=5e-3)


def test_a_scan_of_another_frame_is_refused_in_one_line(scene, tmp_path, capsys):
    pytest.importorskip("laspy")
    points, colors = sphere(400)
    path = tmp_path / "scan.las"
    write_scan(path, points + [500_000, 5_400_000, 300], colors)
    assert train(scene, tmp_path / "out", "--init_ply", path) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "none of its 400 points lies where the photographs look" in error
    assert not (tmp_path / "out").exists()


def frame_of_tiny() -> ScanFrame:
    return ScanFrame.of(tiny_cameras(), sphere(300, seed=5)[0])


def test_a_scan_in_another_unit_is_refused(tmp_path):
    path = tmp_path / "scan.ply"
    points, colors = sphere(400)
    for factor in (0.3, 2.0):
        write_scan(path, factor * points, colors)
        with pytest.raises(UserError, match="in another frame or unit"):
            scan_in_scene(path, frame_of_tiny(), 1000, [].append, same)


def test_a_scan_of_a_part_of_the_scene_is_taken(tmp_path):
    path = tmp_path / "scan.ply"
    points, colors = sphere(4000)
    part = points[:, 2] > 0.3
    write_scan(path, points[part], colors[part])
    notes: list[str] = []
    scan = scan_in_scene(path, frame_of_tiny(), 10_000, notes.append, same)
    assert len(scan.positions) == part.sum()
    assert "of the scene's points have the scan within" in notes[-1]


def test_scans_of_captures_far_from_the_origin_are_in_either_coordinates(tmp_path):
    offset = np.array([500_000.0, 5_400_000.0, 300.0])
    points, _ = sphere(50)
    np.testing.assert_allclose(without_offset(offset)(points + offset), points, atol=1e-6)
    np.testing.assert_allclose(without_offset(offset)(points), points)


@pytest.mark.parametrize("suffix", [".las", ".laz", ".e57"])
def test_damaged_scans_are_errors_of_one_line(suffix, tmp_path):
    path = tmp_path / f"scan{suffix}"
    write_scan(path, *sphere(300))
    content = path.read_bytes()
    rng = np.random.default_rng(8)
    messages = []
    for attempt in range(60):
        damaged = bytearray(content[: rng.integers(1, len(content))])
        if attempt % 2:
            damaged = bytearray(content)
            damaged[rng.integers(0, min(400, len(damaged)))] = rng.integers(0, 256)
        path.write_bytes(bytes(damaged))
        try:
            read_scan(path, 1000, [].append, same, everything)
        except UserError as error:
            messages.append(str(error))
    assert len(messages) > 20
    assert not any("\n" in message for message in messages)


@pytest.mark.parametrize("start", [100, 243])
def test_a_header_of_billions_of_records_is_refused_at_once(start, tmp_path, monkeypatch):
    laspy = pytest.importorskip("laspy")
    path = tmp_path / "scan.las"
    write_scan(path, *sphere(300))
    content = bytearray(path.read_bytes())
    content[24:26] = b"\x01\x04"
    content[start : start + 4] = b"\xff\xff\xff\xff"
    path.write_bytes(bytes(content))
    monkeypatch.setattr(laspy, "open", None)  # it would read for hours
    with pytest.raises(UserError, match="damaged"):
        read_scan(path, 1000, [].append, same, everything)


def test_empty_scans_are_refused(tmp_path):
    pytest.importorskip("laspy")
    path = tmp_path / "scan.las"
    write_scan(path, np.zeros((0, 3)), None)
    with pytest.raises(UserError, match="has no points"):
        read_scan(path, 1000, [].append, same, everything)


@pytest.mark.parametrize(("suffix", "module"), [(".las", "laspy"), (".e57", "pye57")])
def test_a_missing_library_is_named(suffix, module, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    path = tmp_path / f"scan{suffix}"
    path.write_bytes(b"something")
    with pytest.raises(UserError, match=f"needs the package {module}"):
        read_scan(path, 1000, [].append, same, everything)


def survey_list(folder: Path, scene: TinyScene) -> Path:
    """Control points of the tiny scene, without errors."""
    points = places(8)
    lines = list_lines(scene.cameras, points, TO_MAP.moved(points))
    return write_list(folder / "gcp_list.txt", lines)


@pytest.mark.parametrize(("suffix", "epsg"), [(".las", None), (".las", 32632), (".e57", None)])
def test_a_scan_on_the_map_comes_to_the_world_of_the_scene(suffix, epsg, scene, tmp_path):
    points, colors = sphere(400)
    on_map = TO_MAP.moved(points)
    if epsg is not None:
        # A scan in the neighbouring zone is converted.
        pyproj = pytest.importorskip("pyproj")
        transformer = pyproj.Transformer.from_crs(EPSG, epsg, always_xy=True)
        on_map = np.stack(transformer.transform(*on_map.T), axis=1)
    path = tmp_path / f"scan{suffix}"
    write_scan(path, on_map, colors, epsg)
    target = tmp_path / "points.ply"
    words = [path, "-s", scene.root, "-o", target, "--gcp", survey_list(tmp_path, scene)]
    assert run_cli(verbs.scan.main, *words) == 0
    found, found_colors = read_point_ply(target)
    np.testing.assert_allclose(found, points, atol=1e-3)
    np.testing.assert_array_equal(found_colors, colors)
    before = target.read_bytes()
    assert run_cli(verbs.scan.main, *words) == 2
    assert target.read_bytes() == before


FEET = 3937 / 1200  # US survey feet in a metre
KEYS_OF_FEET = {3072: EPSG, 4099: 9003}  # system and unit of heights, as EPSG codes


def write_las(path: Path, points: np.ndarray, system: str | dict[int, int] | None) -> None:
    """Write a LAS file whose system is WKT or, as in older files, keys of GeoTIFF."""
    laspy = pytest.importorskip("laspy")
    pyproj = pytest.importorskip("pyproj")
    header = laspy.LasHeader(point_format=1, version="1.2" if isinstance(system, dict) else "1.4")
    header.offsets = np.floor(points.min(axis=0))
    header.scales = np.full(3, 1e-6)
    if isinstance(system, str):
        wkt = pyproj.CRS.from_user_input(system).to_wkt()
        header.vlrs.append(laspy.vlrs.known.WktCoordinateSystemVlr(wkt))
        header.global_encoding.wkt = True
    elif system is not None:
        numbers = [1, 1, 0, len(system)]
        for key, value in system.items():
            numbers += [key, 0, 1, value]
        data = np.array(numbers, "<u2").tobytes()
        header.vlrs.append(laspy.VLR("LASF_Projection", 34735, record_data=data))
    las = laspy.LasData(header)
    las.xyz = points
    las.write(str(path))


def placed_scan(scene: TinyScene, path: Path) -> int:
    """Place a scan by control points; the exit code."""
    gcp = survey_list(path.parent, scene)
    words = [path, "-s", scene.root, "-o", path.with_name("points.ply"), "--gcp", gcp]
    return run_cli(verbs.scan.main, *words)


@pytest.mark.parametrize("system", [f"EPSG:{EPSG}+6360", KEYS_OF_FEET, {3072: EPSG, 4096: 6360}])
def test_heights_of_a_scan_in_feet_become_metres(system, scene, tmp_path, capsys):
    points, _ = sphere(400)
    path = tmp_path / "scan.las"
    write_las(path, TO_MAP.moved(points) * [1, 1, FEET], system)
    assert placed_scan(scene, path) == 0
    found, _ = read_point_ply(tmp_path / "points.ply")
    np.testing.assert_allclose(found, points, atol=1e-3)
    assert "heights are not converted" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("system", "message"),
    [
        ("EPSG:2263", "the unit of heights is unknown"),
        # The system is one of its own, and only its unit is told.
        ({3072: 32767, 3076: 9003}, "a unit of EPSG 9003, and no system with it"),
        ({3072: EPSG, 3076: 9002}, "a unit of EPSG 9002, and no system with it"),
    ],
)
def test_scans_in_feet_whose_meaning_is_unknown_are_refused(
    system, message, scene, tmp_path, capsys
):
    path = tmp_path / "scan.las"
    write_las(path, TO_MAP.moved(sphere(100)[0]), system)
    assert placed_scan(scene, path) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("system", "code"), [("EPSG:32632", 0), ("EPSG:2263", 2), ("EPSG:32633+6360", 2)]
)
def test_the_system_of_an_e57_file_counts(system, code, scene, tmp_path, capsys, monkeypatch):
    pye57 = pytest.importorskip("pye57")
    pyproj = pytest.importorskip("pyproj")
    points, _ = sphere(400)
    to_system = pyproj.Transformer.from_crs(EPSG, 32632, always_xy=True)
    moved = np.stack(to_system.transform(*TO_MAP.moved(points).T), axis=1)
    path = tmp_path / "scan.e57"
    # The library leaves the text of the system empty.
    wkt = pyproj.CRS.from_user_input(system).to_wkt()
    node = pye57.libe57.StringNode
    monkeypatch.setattr(pye57.libe57, "StringNode", lambda imf, text: node(imf, text or wkt))
    file = pye57.E57(str(path), mode="w")
    data = {f"cartesian{axis}": moved[:, index] for index, axis in enumerate("XYZ")}
    file.write_scan_raw(data)
    file.close()
    assert placed_scan(scene, path) == code
    if code == 0:
        found, _ = read_point_ply(tmp_path / "points.ply")
        # Coordinates of the file are float32.
        np.testing.assert_allclose(found, points, atol=0.02)
    else:
        assert "in US survey foot; choose a system in metres" in capsys.readouterr().err


def test_a_scan_on_the_map_is_refused_without_the_map(scene, tmp_path, capsys):
    pytest.importorskip("laspy")
    points, colors = sphere(100)
    path = tmp_path / "scan.las"
    write_scan(path, TO_MAP.moved(points), colors)
    target = tmp_path / "points.ply"
    error = refusal(capsys, verbs.scan.main, path, "-s", scene.root, "-o", target)
    assert "scan with --gcp or --gps" in error
    assert not target.exists()


def ray_depth(camera: Camera, radius: float) -> np.ndarray:
    """Depth of the nearest point of a sphere around the origin, 0 beside it. (H, W)"""
    v, u = np.mgrid[0 : camera.height, 0 : camera.width] + 0.5
    x = (u - camera.cx) / camera.fx
    y = (v - camera.cy) / camera.fy
    directions = np.stack([x, y, np.ones_like(x)], axis=-1)
    middle = camera.translation
    a = (directions**2).sum(axis=-1)
    b = directions @ middle
    root = b**2 - a * (middle @ middle - radius**2)
    return np.where(root > 0, (b - np.sqrt(np.maximum(root, 0))) / a, 0.0)


@pytest.mark.parametrize("n_points", [4_000, 60_000])
def test_depth_of_a_scan_is_that_of_the_nearest_surface(n_points):
    """The far side of the sphere is not seen through the gaps of the near one."""
    points, _ = sphere(n_points)
    camera = tiny_cameras(3, zoom=4)[1]
    depth = depth_of_points(points, camera, point_spacing(points))
    truth = ray_depth(camera, 1.0)
    known = (depth > 0) & (truth > 0)
    errors = np.abs(depth - truth)[known] / truth[known]
    assert known.sum() > 0.2 * (truth > 0).sum()
    assert np.median(errors) < 0.01
    # The far side is 30 % and more behind the near one, but for the rim.
    assert (errors > 0.15).mean() < 0.005
    # Beside the sphere there is nothing, but for half a splat.
    assert ((depth > 0) & (truth == 0)).sum() < 0.05 * known.sum()
    empty = depth_of_points(points + [0, 0, 1000], camera, 0.1)
    assert not empty.any()


@pytest.mark.parametrize("suffix", [".las", ".ply"])
def test_a_scan_is_depth_for_each_photograph(suffix, scene, tmp_path):
    points, colors = sphere(30_000)
    path = tmp_path / f"scan{suffix}"
    write_scan(path, points, colors)
    lines: list[str] = []
    loaded = load_scene(
        scene.root,
        size_rule=VanillaSize(),
        eval_split=False,
        depths=DepthOptions(depths=str(path)),
        notify=lines.append,
    )
    assert len(loaded.depths.maps) == 10
    camera = loaded.train_cameras[0]
    depth = loaded.depths.of(camera, torch.device("cpu"))
    truth = ray_depth(camera, 1.0)
    both = (depth.numpy() > 0) & (truth > 0)
    assert both.sum() > 0.8 * (truth > 0).sum()
    assert np.median(np.abs(depth.numpy() / np.where(truth > 0, truth, 1) - 1)[both]) < 0.02
    assert any("in 10 of 10 photographs" in line for line in lines)


@pytest.mark.slow
def test_a_run_takes_a_scan_as_depth(scene, tmp_path, capsys):
    pytest.importorskip("laspy")
    path = tmp_path / "scan.las"
    write_scan(path, *sphere(20_000))
    assert train(scene, tmp_path / "out", "--depths", path) == 0
    assert "in 10 of 10 photographs" in capsys.readouterr().out
    assert train(scene, tmp_path / "other", "--depths", tmp_path / "gone.las") == 2
    assert "gone.las: no such file" in capsys.readouterr().err
