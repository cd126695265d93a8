# SPDX-License-Identifier: Apache-2.0
"""Captures find their place on a map by control points or by GPS, and say how well."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pycolmap
import pytest
from PIL import Image

from gaussian_splatting.data.cameras import Camera
from gaussian_splatting.data.images import lens_of
from sugar_capture.gps.gps_tags import read_gps
from sugar_maps.control_points import read_control_points
from sugar_maps.map_conversion import Conversion, conversion
from sugar_maps.map_placement import MapFlags, MapPlacement
from sugar_maps.map_systems import TangentPlane, system_of_text
from sugar_maps.placing import place_on_map
from sugar_maps.similarity import fitted, robust_fit
from sugar_utils.errors import UserError
from tests.support.random_scenes import look_at
from tests.support.survey import (
    EPSG,
    SCALE,
    TO_MAP,
    Capture,
    list_lines,
    places,
    tag_with_gps,
    turn_between,
    write_list,
)
from tests.support.tiny_scene import tiny_cameras, write_model

LATITUDE = 48.76


def capture_in(root: Path, n: int = 12) -> Capture:
    """Cameras of 1600 x 1200 pixels around the places of the control points."""
    return Capture(root, tiny_cameras(n, zoom=25))


def placed(capture: Capture, *gcp: Path, notes: list[str] | None = None, **flags) -> MapPlacement:
    """The placement of a capture."""
    lines = [] if notes is None else notes
    options = MapFlags(gcp=gcp or None, gps="none" if gcp else "auto", **flags)
    return place_on_map(capture, options, lines.append)


def assert_known_similarity(placement: MapPlacement, points: np.ndarray, noise: float) -> None:
    """Compare with the truth: at the middle of ``points`` twice the error of a mean is allowed."""
    similarity = placement.similarity
    assert similarity.scale == pytest.approx(SCALE, rel=0.002)
    assert turn_between(similarity.rotation, TO_MAP.rotation) < 0.3
    middle = points.mean(axis=0)[None]
    error = similarity.moved(middle) + placement.offset - TO_MAP.moved(middle)
    assert np.linalg.norm(error) < 2 * noise / np.sqrt(len(points))


def survey(root: Path, n: int = 10, noise: float = 0.02, pixels: float = 0.5) -> tuple:
    """A capture, the world points, and a list whose positions have errors in metres."""
    capture = capture_in(root)
    points = places(n)
    errors = noise * np.random.default_rng(2).normal(size=(n, 3)) / np.sqrt(3)
    lines = list_lines(capture.calibrated_cameras, points, TO_MAP.moved(points) + errors, pixels)
    return capture, points, lines


def test_control_points_with_errors_give_scale_orientation_and_position(tmp_path):
    capture, points, lines = survey(tmp_path)
    notes: list[str] = []
    placement = placed(capture, write_list(tmp_path / "gcp_list.txt", lines), notes=notes)
    assert placement.epsg == EPSG
    assert_known_similarity(placement, points, noise=0.02)
    roles = [residual.role for residual in placement.residuals]
    assert roles == (["control"] * 4 + ["check"]) * 2
    assert 0 < placement.rms("control") < 0.05
    assert 0 < placement.rms("check") < 0.08
    assert "8 control" in notes[0]
    assert "2 check" in notes[0]
    # Offsets are whole metres; what is left fits into float32.
    assert np.array_equal(placement.offset, np.round(placement.offset))
    assert np.abs(placement.similarity.moved(points)).max() < 100


def test_points_named_check_are_held_out_and_others_are_not(tmp_path):
    capture = capture_in(tmp_path)
    points = places(8)
    positions = TO_MAP.moved(points)
    positions[6] += [0, 0, 1.5]
    names = [f"P{k}" for k in range(6)] + ["CHECK_a", "b_check"]
    lines = list_lines(capture.calibrated_cameras, points, positions, names=names)
    placement = placed(capture, write_list(tmp_path / "gcp_list.txt", lines))
    by_name = {residual.name: residual for residual in placement.residuals}
    assert [name for name, one in by_name.items() if one.role == "check"] == names[6:]
    np.testing.assert_allclose(by_name["CHECK_a"].difference, [0, 0, -1.5], atol=1e-3)
    assert placement.rms("control") < 1e-3


def test_one_wrong_control_point_of_many_is_left_out_by_name(tmp_path):
    capture = capture_in(tmp_path)
    points = places(9)
    positions = TO_MAP.moved(points)
    positions[2, 0] += 4.0
    lines = list_lines(capture.calibrated_cameras, points, positions)
    notes: list[str] = []
    placement = placed(capture, write_list(tmp_path / "gcp_list.txt", lines), notes=notes)
    assert_known_similarity(placement, points, noise=1e-3)
    assert any("left out" in note and "P2" in note for note in notes)


@pytest.mark.parametrize(
    ("system", "epsg"),
    [
        ("EPSG:32633", 32633),
        ("epsg:32733", 32733),
        ("WGS84 UTM 33N", 32633),
        ("WGS 84 / UTM zone 5S", 32705),
        ("+proj=utm +zone=33 +datum=WGS84 +units=m +no_defs", 32633),
        ("+proj=utm +zone=7 +south +ellps=WGS84 +units=m", 32707),
    ],
)
@pytest.mark.parametrize("has_pyproj", [True, False])
def test_systems_are_read_as_opendronemap_writes_them(system, epsg, has_pyproj, monkeypatch):
    if has_pyproj:
        pytest.importorskip("pyproj")
    else:
        monkeypatch.setitem(sys.modules, "pyproj", None)
    assert system_of_text(system, "here").epsg == epsg


def metashape_files(folder: Path, capture: Capture, points: np.ndarray, header: str) -> Path:
    """Markers and projections of Metashape; positions are those of the map."""
    positions = TO_MAP.moved(points)
    rows = [f"P{k},{x:.4f},{y:.4f},{z:.4f}" for k, (x, y, z) in enumerate(positions)]
    markers = folder / "markers.csv"
    markers.write_text("\n".join([*header.splitlines(), *rows]) + "\n")
    lines = [line.split() for line in list_lines(capture.calibrated_cameras, points, positions)]
    table = ["Image label;Marker label;x;y"]
    table += [f"{image};{name};{u.replace('.', ',')};{v}" for *_, u, v, image, name in lines]
    (folder / "markers_projections.csv").write_text("\n".join(table) + "\n")
    return markers


METASHAPE_HEADER = (
    '# CoordinateSystem: PROJCS["WGS 84 / UTM zone 33N",GEOGCS["WGS 84",AUTHORITY["EPSG","4326"]],'
    'UNIT["metre",1],AUTHORITY["EPSG","32633"]]\n#Label,X/Easting,Y/Northing,Z/Altitude'
)


@pytest.mark.parametrize("header", [METASHAPE_HEADER, "label,x,y,z", ""])
def test_markers_and_projections_of_metashape_are_read(header, tmp_path):
    capture = capture_in(tmp_path)
    points = places(5)
    markers = metashape_files(tmp_path, capture, points, header)
    placement = placed(capture, markers, epsg=EPSG)
    assert placement.epsg == EPSG
    assert_known_similarity(placement, points, noise=1e-3)
    second = markers.with_name("second.csv")
    (tmp_path / "markers_projections.csv").rename(second)
    assert placed(capture, markers, second, epsg=EPSG).rms("control") < 1e-3
    with pytest.raises(UserError, match=r"no markers_projections\.csv beside it"):
        placed(capture, markers)


def test_control_points_of_another_system_are_converted(tmp_path):
    pytest.importorskip("pyproj")
    capture, points, lines = survey(tmp_path, noise=1e-3, pixels=0.0)
    path = write_list(tmp_path / "gcp_list.txt", lines)
    here = placed(capture, path)
    other = placed(capture, path, epsg=32632)
    assert other.epsg == 32632
    # North of the neighbouring zone is 4.5 degrees from that of this one, at this latitude.
    turn = turn_between(here.similarity.rotation, other.similarity.rotation)
    assert turn == pytest.approx(6 * np.sin(np.radians(LATITUDE)), abs=0.1)
    assert np.linalg.norm(other.offset - here.offset) > 1e5


# Mercator, equidistant and equal-area projections of the world, and one far from its middle.
STRETCHING = (3857, 4087, 3395, 3832, 6933, 6931)


@pytest.mark.slow
@pytest.mark.parametrize("epsg", STRETCHING)
def test_systems_that_change_lengths_but_not_heights_are_refused(epsg, tmp_path):
    pyproj = pytest.importorskip("pyproj")
    # Flat sites, on which heights tell nothing of the stretch.
    capture = capture_in(tmp_path)
    points = places(9) * [1, 1, 0.02]
    lines = list_lines(capture.calibrated_cameras, points, TO_MAP.moved(points))
    path = write_list(tmp_path / "gcp_list.txt", lines)
    assert "changes lengths by" in refusal(capture, path, epsg=epsg)
    # The same system, of the file itself.
    to_other = pyproj.Transformer.from_crs(EPSG, epsg, always_xy=True)
    moved = np.stack(to_other.transform(*TO_MAP.moved(points).T), axis=1)
    lines = list_lines(capture.calibrated_cameras, points, moved)
    path = write_list(tmp_path / "gcp_list.txt", lines, f"EPSG:{epsg}")
    assert "choose the zone of UTM" in refusal(capture, path)
    assert placed(capture, path, epsg=EPSG).rms("control") < 1e-3
    gps, _ = gps_scene(tmp_path, n=6, noise=0.0)
    assert "changes lengths by" in refusal(gps, epsg=epsg)


LOCAL = 'LOCAL_CS["Site (m)",LOCAL_DATUM["Site",0],UNIT["metre",1]]'


def test_local_systems_have_no_scale_to_check_and_are_taken(tmp_path):
    pytest.importorskip("pyproj")
    capture, points, lines = survey(tmp_path, noise=1e-3, pixels=0.0)
    path = write_list(tmp_path / "gcp_list.txt", lines, LOCAL)
    assert_known_similarity(placed(capture, path), points, noise=1e-3)
    assert "a local system is known to no other" in refusal(capture, path, epsg=EPSG)
    path = write_list(tmp_path / "gcp_list.txt", lines, LOCAL.replace('metre",1', 'foot",0.3048'))
    assert "is in foot" in refusal(capture, path)


FEET = 3937 / 1200  # US survey feet in a metre


def test_heights_in_feet_become_metres_or_are_refused(tmp_path):
    pytest.importorskip("pyproj")
    capture = capture_in(tmp_path)
    points = places(8)
    positions = TO_MAP.moved(points) * [1, 1, FEET]
    lines = list_lines(capture.calibrated_cameras, points, positions)
    path = write_list(tmp_path / "gcp_list.txt", lines, f"EPSG:{EPSG}+6360")
    assert "has heights in US survey foot" in refusal(capture, path)
    notes: list[str] = []
    placement = placed(capture, path, epsg=EPSG, notes=notes)
    assert_known_similarity(placement, points, noise=1e-3)
    assert "heights are not converted: EPSG:32633 does not say" in notes[0]
    # As a PROJ string.
    text = "+proj=utm +zone=33 +datum=WGS84 +units=m +vunits=us-ft"
    path = write_list(tmp_path / "gcp_list.txt", lines, text)
    assert "has heights in US survey foot" in refusal(capture, path)
    assert_known_similarity(placed(capture, path, epsg=EPSG), points, noise=1e-3)


def way_between(source: str, target: str, point: np.ndarray) -> Conversion:
    """The way from one system to another near a point, (3,)."""
    systems = system_of_text(source, "here"), system_of_text(target, "here")
    return conversion(*systems, systems[0], point, "here")


def converted(source: str, target: str, *position: float) -> list[float]:
    """A position in another system."""
    point = np.array(position)
    return way_between(source, target, point).apply(point[None])[0].tolist()


def test_conversions_keep_what_heights_mean():
    pyproj = pytest.importorskip("pyproj")
    pyproj.network.set_network_enabled(active=False)
    metres = converted("EPSG:2263+6360", "EPSG:32618", 1e6, 2e5, 100 * FEET)
    assert metres[2] == pytest.approx(100)
    assert converted("EPSG:2263+5703", "EPSG:32618", 1e6, 2e5, 100)[2] == pytest.approx(100)
    assert converted("EPSG:6346+6360", "EPSG:6346+5703", 5e5, 4e6, 100 * FEET)[2] == pytest.approx(
        100
    )
    # EPSG:5715 is depth below mean sea level.
    assert converted("EPSG:32633+5715", "EPSG:32632", 5e5, 5e6, 7)[2] == pytest.approx(-7)
    with pytest.raises(UserError, match="the unit of heights is unknown"):
        converted("EPSG:2263", "EPSG:32618", 1e6, 2e5, 100)
    # Nothing tells how far these datums are from each other.
    way = way_between("EPSG:4547", "EPSG:32649", np.array([5e5, 4e6, 100]))
    assert "does not know how the datums of" in way.notes[0]
    way = way_between("EPSG:4326", "EPSG:28992", np.array([15.0, 48.76, 300]))
    assert "lies outside of where" in way.notes[0]


def test_a_missing_grid_of_heights_is_named(tmp_path, monkeypatch):
    pyproj = pytest.importorskip("pyproj")
    pyproj.network.set_network_enabled(active=False)
    grid = pyproj.datadir.get_data_dir()
    if list(Path(grid).glob("nl_nsgi_nlgeo2018*")):
        pytest.skip("the grid is installed")
    with pytest.raises(UserError, match="takes a grid that PROJ does not have here .*nlgeo2018"):
        converted("EPSG:4979", "EPSG:7415", 5.0, 52.0, 100)


@pytest.mark.slow
def test_gps_that_misses_the_capture_is_refused_or_named(tmp_path):
    pytest.importorskip("pyproj")
    notes: list[str] = []
    placed(gps_scene(tmp_path, noise=3.0, size=0.3)[0], notes=notes)
    assert not any("imprecise" in note for note in notes)
    placed(gps_scene(tmp_path, noise=8.0, size=0.3)[0], notes=notes)
    assert any("GPS is imprecise for a capture of this size" in note for note in notes)
    message = refusal(gps_scene(tmp_path, noise=14.0, size=0.3)[0])
    assert f"{tmp_path}: GPS does not fit the capture: 12.1 m RMS over 104 m" in message


def test_check_points_that_miss_the_map_are_named(tmp_path):
    capture = capture_in(tmp_path)
    points = places(8)
    positions = TO_MAP.moved(points)
    positions[6] += [0, 0, 9.0]
    names = [f"P{k}" for k in range(6)] + ["check_a", "check_b"]
    lines = list_lines(capture.calibrated_cameras, points, positions, names=names)
    notes: list[str] = []
    placed(capture, write_list(tmp_path / "gcp_list.txt", lines), notes=notes)
    assert any("check points miss the map" in note and "check_a 9 m" in note for note in notes)


def test_pixels_of_a_distorted_photograph_are_those_of_its_lens(tmp_path):
    text = "SIMPLE_RADIAL 1600 1200 [1500.0, 800.0, 600.0, 0.12]"
    lens = lens_of(text, 1600, 1200)
    Image.new("RGB", (1600, 1200)).save(tmp_path / "taken.jpg")
    cameras = [
        replace(camera, source_path=tmp_path / "taken.jpg", lens=text)
        for camera in tiny_cameras(8, zoom=25)
    ]
    points = places(5)
    lines = []
    for row, point in enumerate(points):
        x, y, z = TO_MAP.moved(point[None])[0]
        for camera in cameras:
            u, v = lens.img_from_cam(camera.rotation @ point + camera.translation)
            lines.append(f"{x:.4f} {y:.4f} {z:.4f} {u:.3f} {v:.3f} {camera.name} P{row}")
    path = write_list(tmp_path / "gcp_list.txt", lines)
    placement = placed(Capture(tmp_path, cameras), path)
    assert_known_similarity(placement, points, noise=1e-3)
    assert max(residual.pixels for residual in placement.residuals) < 0.01


@pytest.mark.slow
@pytest.mark.parametrize("folder", ["input", "."])
def test_pixels_of_photographs_that_convert_flattened_are_those_of_the_originals(folder, tmp_path):
    flat = tiny_cameras(8, zoom=25)
    model = tmp_path / "distorted" / "sparse" / "0"
    write_model(model, flat, np.zeros((1, 3)), np.zeros((1, 3), np.uint8))
    reconstruction = pycolmap.Reconstruction(str(model))
    lens = lens_of("SIMPLE_RADIAL 1600 1200 [1500.0, 800.0, 600.0, 0.12]", 1600, 1200)
    for number, camera in reconstruction.cameras.items():
        camera.mergedict({**lens.todict(), "camera_id": number})
    reconstruction.write_binary(str(model))
    # The photographs are twice as large as those that features were looked for in.
    for camera in flat:
        path = tmp_path / folder / camera.name
        path.parent.mkdir(exist_ok=True)
        Image.new("RGB", (3200, 2400)).save(path)
    points = places(5)
    lines = []
    for row, point in enumerate(points):
        x, y, z = TO_MAP.moved(point[None])[0]
        for camera in flat:
            u, v = 2 * np.array(lens.img_from_cam(camera.rotation @ point + camera.translation))
            lines.append(f"{x:.4f} {y:.4f} {z:.4f} {u:.3f} {v:.3f} {camera.name} P{row}")
    placement = placed(Capture(tmp_path, flat), write_list(tmp_path / "gcp_list.txt", lines))
    assert_known_similarity(placement, points, noise=1e-3)
    assert max(residual.pixels for residual in placement.residuals) < 0.01


def test_robust_fits_find_the_similarity_among_outliers():
    rng = np.random.default_rng(4)
    source = rng.normal(size=(60, 3))
    target = TO_MAP.moved(source) - TO_MAP.translation + 0.05 * rng.normal(size=(60, 3))
    target[:20] += rng.normal(size=(20, 3)) * 40
    fit = robust_fit(source, target)
    assert fit.similarity.scale == pytest.approx(SCALE, rel=0.002)
    assert turn_between(fit.similarity.rotation, TO_MAP.rotation) < 0.3
    assert fit.is_used[20:].all()
    assert not fit.is_used[:20].any()
    # Least squares of all points does not.
    assert abs(fitted(source, target).similarity.scale / SCALE - 1) > 0.01


def gps_scene(
    root: Path, n: int = 40, noise: float = 0.2, size: float = 1.0
) -> tuple[Capture, np.ndarray]:
    """Photographs with GPS, in a tangent plane, and the centres of their cameras."""
    pyproj = pytest.importorskip("pyproj")
    to_degrees = pyproj.Transformer.from_crs(EPSG, 4326, always_xy=True)
    cameras = []
    rng = np.random.default_rng(5)
    for camera in tiny_cameras(n, zoom=25):
        path = root / camera.name
        Image.new("RGB", (16, 12)).save(path)
        position = TO_MAP.moved(size * camera.center[None])[0] + noise * rng.normal(
            size=3
        ) / np.sqrt(3)
        longitude, latitude, altitude = to_degrees.transform(*position)
        tag_with_gps(path, longitude, latitude, altitude)
        cameras.append(replace(camera, image_path=path))
    return Capture(root, cameras), np.stack([camera.center for camera in cameras])


def test_gps_with_errors_gives_scale_orientation_and_position(tmp_path):
    capture, centers = gps_scene(tmp_path)
    notes: list[str] = []
    placement = placed(capture, notes=notes)
    assert placement.epsg == EPSG
    assert_known_similarity(placement, centers, noise=0.2)
    assert placement.rms("control") == pytest.approx(0.2, rel=0.25)
    assert "40 control" in notes[0]


def test_gps_of_flat_copies_is_that_of_the_originals(tmp_path):
    capture, centers = gps_scene(tmp_path, n=12)
    (tmp_path / "input").mkdir()
    for camera in capture.calibrated_cameras:
        camera.image_file.rename(tmp_path / "input" / camera.name)
        Image.new("RGB", (16, 12)).save(camera.image_file)
    assert_known_similarity(placed(capture), centers, noise=0.2)


def test_gps_of_another_continent_is_named_and_left_out(tmp_path):
    capture, centers = gps_scene(tmp_path, n=12)
    tag_with_gps(tmp_path / "view_03.png", 151.2, -33.9, 20.0)
    tag_with_gps(tmp_path / "view_05.png", 15.0 + 0.004, 48.757, 400.0)
    notes: list[str] = []
    placement = placed(capture, notes=notes)
    assert "view_03.png is left out" in notes[0]
    assert " km from the others" in notes[0]
    # A shorter way off is found by how the others agree.
    assert any("do not agree" in note and "view_05.png" in note for note in notes)
    assert_known_similarity(placement, np.delete(centers, [3, 5], axis=0), noise=0.2)


def test_without_pyproj_gps_is_metres_in_a_tangent_plane(tmp_path, monkeypatch):
    capture, _ = gps_scene(tmp_path, n=12, noise=0.0)
    with_pyproj = placed(capture)
    monkeypatch.setitem(sys.modules, "pyproj", None)
    placement = placed(capture)
    assert placement.epsg is None
    assert placement.plane is not None
    assert "metres east, north and up of" in placement.system_name
    # UTM makes lengths 0.04 % shorter at its central meridian, and more so above sea level.
    ratio = with_pyproj.similarity.scale / placement.similarity.scale
    assert ratio == pytest.approx(0.9996, abs=5e-5)
    assert turn_between(placement.similarity.rotation, TO_MAP.rotation) < 0.05
    with pytest.raises(UserError, match=r"needs the package pyproj"):
        placed(capture, epsg=EPSG)


def test_a_tangent_plane_agrees_with_pyproj():
    pyproj = pytest.importorskip("pyproj")
    plane = TangentPlane(latitude=-33.4, longitude=151.3, altitude=80.0)
    pipeline = (
        "+proj=pipeline +step +proj=cart +ellps=WGS84 +step +proj=topocentric +ellps=WGS84 "
        "+lon_0=151.3 +lat_0=-33.4 +h_0=80"
    )
    points = np.array([[151.3, -33.4, 80.0], [151.31, -33.39, 120.0], [151.2, -33.5, -5.0]])
    expected = pyproj.Transformer.from_pipeline(pipeline).transform(*points.T)
    np.testing.assert_allclose(plane.positions(points), np.stack(expected, axis=1), atol=1e-6)


def test_gps_is_read_with_its_signs_and_unset_ones_are_none(tmp_path):
    path = tmp_path / "a.jpg"
    Image.new("RGB", (8, 8)).save(path)
    assert read_gps(path).position is None
    tag_with_gps(path, -70.5, -12.25, -3.5)
    position = read_gps(path).position
    assert position is not None
    np.testing.assert_allclose(position, (-70.5, -12.25, -3.5), atol=1e-8)
    tag_with_gps(path, 0.0, 0.0, 10.0)
    assert read_gps(path).position is None


def refusal(capture: Capture, *gcp: Path, **flags) -> str:
    """The one line of the error."""
    with pytest.raises(UserError) as caught:
        placed(capture, *gcp, **flags)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_bad_control_points_are_refused_in_one_line(tmp_path):
    capture, _, lines = survey(tmp_path)
    path = tmp_path / "gcp_list.txt"

    def written(*changed: str, system: str = f"EPSG:{EPSG}") -> Path:
        return write_list(path, changed, system)

    def line_with(index: int, word: str) -> list[str]:
        words = lines[0].split()
        words[index] = word
        return [" ".join(words), *lines[1:]]

    assert "view_99.png is no registered photograph" in refusal(
        capture, written(*line_with(5, "view_99.png"))
    )
    assert "gcp_list.txt, line 2" in refusal(capture, written(*line_with(5, "view_99.png")))
    assert "'east' is no number" in refusal(capture, written(*line_with(0, "east")))
    assert "'nan' is no number" in refusal(capture, written(*line_with(2, "nan")))
    assert "P0 has another position" in refusal(capture, written(*line_with(2, "320.0")))
    assert "outside of" in refusal(capture, written(*line_with(3, "5000")))
    twice = refusal(capture, written(*lines, lines[3]))
    assert "is in view_" in twice
    assert "line 5" in twice
    assert "has 4 columns" in refusal(capture, written(*lines, "1 2 3 4"))
    two = [line for line in lines if line.endswith((" P0", " P1"))]
    assert "2 control points are seen by 2 photographs" in refusal(capture, written(*two))
    once = list({line.split()[-1]: line for line in lines}.values())
    assert "0 control points are seen" in refusal(capture, written(*once))
    checks = [f"{line}_check" for line in lines]
    assert "rename some" in refusal(capture, written(*checks))
    assert "'UTM'" in refusal(capture, written(*lines, system="UTM"))
    assert "no such file" in refusal(capture, tmp_path / "missing.txt").lower()


def test_control_points_of_another_frame_are_refused_with_the_numbers(tmp_path):
    capture = capture_in(tmp_path)
    points = places(8)
    elsewhere = np.random.default_rng(9).uniform(0, 100, (8, 3)) + TO_MAP.translation
    lines = list_lines(capture.calibrated_cameras, points, elsewhere)
    message = refusal(capture, write_list(tmp_path / "gcp_list.txt", lines))
    assert "do not fit the capture" in message or "scatter by" in message
    assert " m RMS over " in message or " m over a capture " in message


def test_control_points_on_a_line_are_refused(tmp_path):
    capture = capture_in(tmp_path)
    points = np.linspace(-0.6, 0.6, 5)[:, None] * np.array([[1.0, 0.5, 0.3]])
    lines = list_lines(capture.calibrated_cameras, points, TO_MAP.moved(points))
    message = refusal(capture, write_list(tmp_path / "gcp_list.txt", lines))
    assert "lie on a line" in message


def test_swapped_coordinates_are_noted_where_the_points_lie_flat(tmp_path):
    pytest.importorskip("pyproj")
    cameras: list[Camera] = []
    for k in range(9):
        x, y = divmod(k, 3)
        center = (x - 1.0, y - 1.0 + 0.1 * k, 4.0)
        cameras.append(
            look_at(center, target=(x - 1.0, y - 0.99, 0), width=1600, height=1200, focal=900.0)
        )
    cameras = [replace(camera, name=f"{k}.jpg") for k, camera in enumerate(cameras)]
    points = places(7) * [1, 1, 0.02]
    positions = TO_MAP.moved(points)
    path = tmp_path / "gcp_list.txt"
    notes: list[str] = []
    placed(
        Capture(tmp_path, cameras),
        write_list(path, list_lines(cameras, points, positions)),
        notes=notes,
    )
    assert not any("swapped" in note for note in notes)
    swapped = list_lines(cameras, points, positions[:, [1, 0, 2]])
    # A system that has no scale to tell it by.
    placed(Capture(tmp_path, cameras), write_list(path, swapped, LOCAL), notes=notes)
    assert any("swapped" in note for note in notes)
    assert "x and y of the points swapped?" in refusal(
        Capture(tmp_path, cameras), write_list(path, swapped)
    )


def test_systems_that_are_none_for_a_map_are_refused():
    pytest.importorskip("pyproj")
    for code, text in ((999_999, "no coordinate system"), (4326, "in degrees"), (2263, "foot")):
        with pytest.raises(UserError, match=text):
            MapFlags(gps="auto", epsg=code)
    with pytest.raises(UserError, match="pass --gcp or --gps auto"):
        MapFlags(epsg=EPSG)


def test_targets_without_opencv_are_refused(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "cv2", None)
    message = refusal(capture_in(tmp_path), targets="apriltag36h11", target_size=0.1)
    assert "--targets needs the package opencv-python-headless" in message


def test_photographs_without_gps_are_refused(tmp_path):
    assert "0 photographs have GPS" in refusal(capture_in(tmp_path))
    capture, _ = gps_scene(tmp_path, n=12)
    for camera in capture.calibrated_cameras[2:]:
        tag = read_gps(camera.image_file).position
        Image.new("RGB", (16, 12)).save(camera.image_file)
        tag_with_gps(camera.image_file, tag.longitude, tag.latitude, None)
    message = refusal(capture)
    assert "2 photographs have GPS" in message
    assert "10 more have no altitude" in message


def test_gps_that_scatters_more_than_the_capture_is_wide_is_refused(tmp_path):
    capture, _ = gps_scene(tmp_path, n=12, noise=150.0)
    message = refusal(capture)
    assert "leaves its orientation open" in message


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["list", "markers", "projections"])
def test_damaged_files_of_control_points_are_errors_of_one_line(kind, tmp_path):
    capture, points, lines = survey(tmp_path, n=5)
    listed = write_list(tmp_path / "gcp_list.txt", lines)
    markers = metashape_files(tmp_path, capture, points, METASHAPE_HEADER)
    projections = tmp_path / "markers_projections.csv"
    target = {"list": listed, "markers": markers, "projections": projections}[kind]
    files = [listed] if kind == "list" else [markers, projections]
    content = target.read_bytes()
    rng = np.random.default_rng(7)
    messages = []
    for _ in range(200):
        damaged = bytearray(content[: rng.integers(1, len(content))])
        for place in rng.integers(0, len(damaged), rng.integers(0, 4)):
            damaged[place] = rng.integers(0, 256)
        target.write_bytes(bytes(damaged))
        try:
            read_control_points(files)
        except UserError as error:
            messages.append(str(error))
    assert len(messages) > 5
    for message in messages:
        assert "\n" not in message
        assert tmp_path.name in message


def test_points_of_a_file_are_read_as_they_are(tmp_path):
    path = write_list(tmp_path / "gcp_list.txt", ["1 2 3 4 5 a.jpg", "1 2 3 6 7 b.jpg", "# note"])
    (point,) = read_control_points([path]).points
    assert point.name == "1 2 3"
    assert [(one.image, one.u, one.v) for one in point.observations] == [
        ("a.jpg", 4, 5),
        ("b.jpg", 6, 7),
    ]


POSITION = (500021.03, 5400012.5, 300.25)
IN_BLANKS = "500021,03 5400012,5 300,25 4,5 6,5 {} P1"
IN_TABS = "500021.03\t5400012.5\t300.25\t4.5\t6.5\t{}\t{}"


@pytest.mark.parametrize(
    ("lines", "image", "name"),
    [
        ([IN_BLANKS.format("a.jpg")], "a.jpg", "P1"),
        ([IN_BLANKS.format("2026 DJI 1.JPG")], "2026 DJI 1.JPG", "P1"),
        ([IN_BLANKS.format('"a 1"')], "a 1", "P1"),
        ([IN_BLANKS.replace(" ", ";").format("a 1.jpg")], "a 1.jpg", "P1"),
        ([IN_BLANKS.replace(" ", "\t").format("a 1.jpg")], "a 1.jpg", "P1"),
        ([IN_TABS.format("a 1.jpg", "Point 1")], "a 1.jpg", "Point 1"),
        ([IN_TABS.format('"a.jpg"', '"P 1"')], "a.jpg", "P 1"),
        (["500021.03, 5400012.5, 300.25, 4.5, 6.5, a 1.jpg, P 1"], "a 1.jpg", "P 1"),
        (["500021.03 5400012.5 300.25 4.5 6.5 a.jpg P1 0.02 0.05"], "a.jpg", "P1"),
        # What follows belongs to the name where its first word is that of another point, too.
        (
            [
                "500021.03 5400012.5 300.25 4.5 6.5 a.jpg Point 1",
                "500029.03 5400012.5 300.25 4.5 6.5 a.jpg Point 2",
            ],
            "a.jpg",
            "Point 1",
        ),
    ],
)
@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_lists_are_read_with_any_separators_and_decimal_commas(
    lines, image, name, encoding, tmp_path
):
    path = tmp_path / "gcp_list.txt"
    path.write_bytes("\r\n".join([f"EPSG:{EPSG}", *lines, ""]).encode(encoding))
    file = read_control_points([path])
    assert file.system is not None
    assert file.system.epsg == EPSG
    point = file.points[0]
    assert point.name == name
    np.testing.assert_array_equal(point.position, POSITION)
    (observation,) = point.observations
    assert observation[:3] == (image, 4.5, 6.5)


@pytest.mark.parametrize(
    "rows",
    [
        ["label x y z", "P1 500021,03 5400012,5 300,25"],
        ["P1 500021,03 5400012,5 300,25"],
        ["Name;Easting;Northing;Height", "P1;500021,03;5400012,5;300,25"],
        ["label\tx\ty\tz", "P1\t500021,03\t5400012,5\t300,25"],
        ["label,x,y,z", '"P1","500021,03","5400012,5","300,25"'],
        ["#name,x,y,alt", "P1, 500021.03, 5400012.5, 300.25,"],
        ["label x y z", '"P1" 500021.03 5400012.5 300.25'],
    ],
)
def test_tables_of_markers_are_read_with_any_separators_and_decimal_commas(rows, tmp_path):
    path = tmp_path / "markers.csv"
    path.write_bytes("\r\n".join([*rows, ""]).encode("utf-8-sig"))
    (point,) = read_control_points([path], needs_pixels=False).points
    assert point.name == "P1"
    np.testing.assert_array_equal(point.position, POSITION)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["EPSG:32633", "500,021.03 5400012.5 300 1 2 a.jpg"], "line 2: '500,021.03' is no number"),
        (["label;x;y;z", "P1;500'021.03;5400012.5;300"], "line 2.*nothing between thousands"),
        (["label;x;y;z", "P1;500 021,03;5400012,5;300"], "line 2.*nothing between thousands"),
        (["EPSG:32633", "5000,03,54000,5,300,25,4,5,6,5,a.jpg"], "line 2.*write decimal points"),
        (["label,x,y,z", "P1,500021,03,5400012,5,300,25"], "line 2.*write decimal points"),
        (["label x y z", "GCP 1 500021.03 5400012.5 300.25"], "line 2.*quote names with blanks"),
    ],
)
def test_numbers_and_names_that_cannot_be_told_apart_are_refused(lines, message, tmp_path):
    path = tmp_path / "gcp.txt"
    path.write_text("\n".join(lines))
    with pytest.raises(UserError, match=message):
        read_control_points([path], needs_pixels=False)
