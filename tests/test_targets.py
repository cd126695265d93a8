# SPDX-License-Identifier: Apache-2.0
"""Printed targets in photographs give scale and control points; sheets of them are printed."""

from __future__ import annotations

import json
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from sugar_extractors.export.export_options import export_parser
from sugar_maps.map_placement import MapFlags, MapPlacement
from sugar_maps.placing import metric_scale, place_on_map
from sugar_maps.printed_targets import detections_in
from sugar_maps.target_places import placed_targets, scale_by_targets
from sugar_maps.target_sheets import (
    PAGES,
    TargetSheetOptions,
    write_target_sheet,
)
from sugar_scene.triangle_mesh import write_mesh_ply
from sugar_utils.console import Console
from sugar_utils.errors import UserError
from tests.support.mesh_scenes import icosahedron
from tests.support.survey import EPSG, Capture, pixel_of, tag_with_gps, turn_between
from tests.support.target_scene import (
    METRES,
    SIDE,
    TO_MAP,
    TargetScene,
    boards,
    make_target_scene,
    marker,
    photograph,
    target_cameras,
)
from tests.support.tiny_scene import run_cli, write_model
from tests.support.verbs import export

pytest.importorskip("cv2")

KIND = "apriltag36h11"
SIZE = SIDE * METRES


@pytest.fixture(scope="module")
def room(tmp_path_factory) -> TargetScene:
    """Twelve photographs of eight targets."""
    return make_target_scene(tmp_path_factory.mktemp("room"), 12)


def with_cameras(scene: TargetScene, *indices: int) -> Capture:
    """The capture with some of its cameras."""
    cameras = [scene.capture.calibrated_cameras[index] for index in indices]
    return Capture(scene.capture.root, cameras)


def write_targets(folder: Path, scene: TargetScene, noise: float = 0.0, header: str = "") -> Path:
    """A file of number, x, y, z with the places of the targets on the map."""
    rng = np.random.default_rng(3)
    lines = [header] if header else []
    for number, middle in scene.middles.items():
        x, y, z = TO_MAP.moved(middle[None])[0] + noise * rng.normal(size=3) / np.sqrt(3)
        lines.append(f"{number},{x:.4f},{y:.4f},{z:.4f}")
    path = folder / "targets.csv"
    path.write_text("\n".join(lines) + "\n")
    return path


def assert_known_placement(placement: MapPlacement, middle: np.ndarray, noise: float) -> None:
    """Compare with the truth; at the middle of ``noise`` it may be twice the error of a mean."""
    assert placement.similarity.scale == pytest.approx(METRES, rel=0.002)
    assert turn_between(placement.similarity.rotation, TO_MAP.rotation) < 0.3
    error = placement.similarity.moved(middle[None]) + placement.offset - TO_MAP.moved(middle[None])
    assert np.linalg.norm(error) < 2 * noise


@pytest.mark.slow
def test_corners_of_targets_are_found_within_a_tenth_of_a_pixel(room):
    camera = room.capture.calibrated_cameras[5]
    errors = []
    for detection in detections_in(camera.image_file, KIND):
        a, b, c, d = detection.corners
        # Diagonals meet in the middle of a square, however it is seen.
        share = np.linalg.solve(np.stack([c - a, b - d], axis=1), b - a)[0]
        errors.append(a + share * (c - a) - pixel_of(camera, room.middles[detection.number]))
    assert len(errors) >= 7
    assert np.abs(np.mean(errors, axis=0)).max() < 0.1
    assert np.linalg.norm(errors, axis=1).max() < 0.2


@pytest.mark.slow
def test_targets_of_a_known_side_give_the_scale(room):
    notes: list[str] = []
    flags = MapFlags(targets=KIND, target_size=SIZE)
    scale = metric_scale(room.capture, flags, notes.append)
    assert scale.metres == pytest.approx(METRES, rel=0.002)
    assert [row.number for row in scale.residuals] == list(room.middles)
    assert all(abs(row.difference) < 0.01 * SIZE for row in scale.residuals)
    assert max(row.pixels for row in scale.residuals) < 1.0
    assert "8 targets" in notes[-1]


@pytest.mark.slow
def test_exports_are_in_metres_by_targets(room, tmp_path):
    """The scale alone: nothing is turned or moved."""
    root = tmp_path / "scene"
    (root / "images").mkdir(parents=True)
    cameras = room.capture.calibrated_cameras
    for camera in cameras:
        shutil.copy(camera.image_file, root / "images" / camera.name)
    points = np.random.default_rng(0).uniform(-1, 1, (50, 3))
    write_model(root / "sparse" / "0", cameras, points, np.zeros((50, 3), np.uint8))
    source = tmp_path / "mesh.ply"
    write_mesh_ply(source, icosahedron())
    target = tmp_path / "points.las"
    words = [source, "--to", "las", "-o", target, "-s", root, "--targets", "--target_size", SIZE]
    laspy = pytest.importorskip("laspy")
    assert run_cli(export.main, *words) == 0
    expected = METRES * icosahedron().vertices
    np.testing.assert_allclose(laspy.read(target).xyz, expected, rtol=0.002, atol=0.002)
    record = json.loads((tmp_path / "points.las.json").read_text())
    assert record["metres"]["scale"] == pytest.approx(METRES, rel=0.002)
    assert len(record["metres"]["targets"]) == 8
    assert run_cli(export.main, *words, "--overwrite", "True", "--scale_factor", 2) == 2


def gps_capture(root: Path, scene: TargetScene, noise: float) -> tuple[Capture, np.ndarray]:
    """The capture and further cameras around it, with noisy GPS, and the middle of all."""
    pyproj = pytest.importorskip("pyproj")
    to_degrees = pyproj.Transformer.from_crs(EPSG, 4326, always_xy=True)
    rng = np.random.default_rng(4)
    # Photographs without targets, which GPS has as well.
    further = [replace(one, name=f"b_{one.name}") for one in target_cameras(36)]
    cameras = []
    for camera in [*scene.capture.calibrated_cameras, *further]:
        path = root / camera.name
        if camera.image_path is None:
            Image.new("L", (80, 60)).save(path)
        else:
            Image.open(camera.image_path).save(path)
        position = TO_MAP.moved(camera.center[None])[0] + noise * rng.normal(size=3) / np.sqrt(3)
        tag_with_gps(path, *to_degrees.transform(*position))
        cameras.append(replace(camera, image_path=path))
    return Capture(root, cameras), np.mean([camera.center for camera in cameras], axis=0)


@pytest.mark.slow
def test_targets_give_the_scale_that_noisy_gps_cannot(room, tmp_path):
    noise = 0.06
    capture, middle = gps_capture(tmp_path, room, noise)
    flags = MapFlags(gps="auto", targets=KIND, target_size=SIZE)
    placement = place_on_map(capture, flags, [].append)
    assert_known_placement(placement, middle, noise / np.sqrt(len(capture.calibrated_cameras)))
    record = placement.record()
    assert len(record["targets"]) == 8
    assert "side of printed targets" in record["source"]
    # UTM is 0.04 % shorter than the ground here, so metres of targets are not those of the map.
    alone = metric_scale(capture, flags, [].append).metres
    assert placement.similarity.scale / alone == pytest.approx(0.9996, abs=5e-5)
    by_gps = place_on_map(capture, MapFlags(gps="auto"), [].append)
    error = abs(placement.similarity.scale / METRES - 1)
    assert abs(by_gps.similarity.scale / METRES - 1) > error


@pytest.mark.slow
@pytest.mark.parametrize("header", ["", "number,x,y,z", "label,x,y,z"])
def test_targets_with_coordinates_are_control_points(header, room, tmp_path):
    path = write_targets(tmp_path, room, noise=0.003, header=header)
    notes: list[str] = []
    flags = MapFlags(gcp=(path,), targets=KIND, target_size=SIZE, epsg=EPSG)
    placement = place_on_map(room.capture, flags, notes.append)
    middle = np.mean(list(room.middles.values()), axis=0)
    assert_known_placement(placement, middle, noise=0.003 / np.sqrt(8))
    assert placement.epsg == EPSG
    roles = [residual.role for residual in placement.residuals]
    assert roles.count("control") == 7
    assert roles.count("check") == 1
    assert "sides of 8 targets" in notes[-1]


@pytest.mark.slow
def test_points_with_pixels_and_targets_go_together(room, tmp_path):
    pytest.importorskip("pyproj")
    path = write_targets(tmp_path, room)
    lines = path.read_text().splitlines()
    extra = np.array([0.3, -0.1, 0.0])
    x, y, z = TO_MAP.moved(extra[None])[0]
    path.write_text("\n".join([*lines, f"nail,{x:.4f},{y:.4f},{z:.4f}"]) + "\n")
    table = ["image,marker,x,y"]
    for camera in room.capture.calibrated_cameras:
        pixel = pixel_of(camera, extra)
        if pixel is not None:
            table.append(f"{camera.name},nail,{pixel[0]:.3f},{pixel[1]:.3f}")
    (tmp_path / "projections.csv").write_text("\n".join(table) + "\n")
    flags = MapFlags(gcp=(path,), targets=KIND, epsg=EPSG)
    placement = place_on_map(room.capture, flags, [].append)
    by_name = {residual.name: residual for residual in placement.residuals}
    assert by_name["nail"].distance < 0.01
    assert len(by_name) == 9
    assert placement.record()["targets"][0]["difference"] is None


@pytest.mark.slow
def test_a_target_of_another_size_is_left_out_of_the_scale_by_number(room):
    targets = placed_targets(room.capture, KIND, [].append)
    middle = targets[2].corners.mean(axis=0)
    targets[2] = replace(targets[2], corners=middle + 1.2 * (targets[2].corners - middle))
    notes: list[str] = []
    scale = scale_by_targets(targets, SIZE, notes.append)
    assert scale.metres == pytest.approx(METRES, rel=0.002)
    assert "target 2 is left out of the scale" in notes[0]
    with pytest.raises(UserError, match="of different sizes"):
        scale_by_targets(targets[1:3], SIZE, notes.append)


@pytest.mark.slow
def test_a_sighting_that_does_not_agree_is_left_out_by_photograph(room):
    capture = with_cameras(room, 2, 4, 6, 8)
    cameras = list(capture.calibrated_cameras)
    # The pose of one camera is wrong by some pixels.
    cameras[1] = replace(cameras[1], cx=cameras[1].cx + 12)
    notes: list[str] = []
    flags = MapFlags(targets=KIND, target_size=SIZE)
    scale = metric_scale(Capture(capture.root, cameras), flags, notes.append)
    assert scale.metres == pytest.approx(METRES, rel=0.004)
    assert any("in view_04.png is left out" in note for note in notes)


def refusal(capture: Capture, **flags) -> str:
    """The one line of the error."""

    def place() -> None:
        options = MapFlags(**{"targets": KIND, **flags})
        used = place_on_map if options.wanted else metric_scale
        used(capture, options, [].append)

    with pytest.raises(UserError) as caught:
        place()
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.slow
def test_bad_targets_are_refused_in_one_line(room, tmp_path):
    capture = room.capture
    assert "it takes 2 from different places" in refusal(with_cameras(room, 5), target_size=SIZE)
    assert "no photograph shows a target" in refusal(
        capture, targets="apriltag25h9", target_size=SIZE
    )
    assert "pass --targets" in refusal(capture, targets=None, target_size=SIZE)
    assert "needs the side of the targets" in refusal(capture)
    other = tmp_path / "others.csv"
    other.write_text("101,1,2,3\n102,2,3,4\n103,5,4,4\n")
    assert "none of the points 101, 102, 103 is a target" in refusal(capture, gcp=(other,))


@pytest.mark.slow
def test_two_targets_with_one_number_in_a_photograph_are_refused(room, tmp_path):
    planes, _ = boards((0, 1, 2, 3, 4, 5, 6, 0))
    camera = target_cameras(12)[5]
    path = tmp_path / camera.name
    Image.fromarray(photograph(camera, planes)).save(path)
    message = refusal(Capture(tmp_path, [replace(camera, image_path=path)]), target_size=SIZE)
    assert "view_05.png: shows two targets with the number 0, at pixels" in message


@pytest.mark.parametrize("size", ["0", "-0.1", "nan", "wide"])
def test_sizes_that_are_none_are_refused(size):
    parser = export_parser(None)
    with pytest.raises((SystemExit, UserError)):
        parser.parse_args(["a.obj", "--to", "glb", "--targets", "--target_size", size])


@pytest.mark.parametrize("kind", ["apriltag25h9", "aruco4x4", "aruco5x5", "aruco6x6"])
def test_other_kinds_are_found(kind, tmp_path):
    cells = np.pad(marker(7, kind), 2, constant_values=1.0)
    pixels = np.kron(cells, np.ones((12, 12))) * 255
    path = tmp_path / "a.png"
    Image.fromarray(pixels.astype(np.uint8)).save(path)
    (detection,) = detections_in(path, kind)
    assert detection.number == 7
    side = 12 * len(marker(7, kind))
    expected = np.array([[0, 0], [side, 0], [side, side], [0, side]]) + 24
    np.testing.assert_allclose(detection.corners, expected, atol=0.05)


def printed_pages(path: Path, dpi: int) -> list[np.ndarray]:
    """The pages of a PDF as poppler draws them, which is not ours. (H, W) uint8 each"""
    folder = path.parent / "pages"
    folder.mkdir()
    command = ["pdftoppm", "-r", str(dpi), "-gray", str(path), str(folder / "page")]
    subprocess.run(command, check=True, timeout=60)
    return [np.asarray(Image.open(page)) for page in sorted(folder.iterdir())]


@pytest.mark.skipif(shutil.which("pdftoppm") is None, reason="draws the pages by poppler")
@pytest.mark.parametrize(("page", "size"), [("a4", 0.1), ("letter", 0.05)])
def test_printed_sheets_have_targets_of_their_exact_size(page, size, tmp_path):
    path = tmp_path / "targets.pdf"
    write_target_sheet(
        TargetSheetOptions(path, target_size=size, count=5, first=3, page=page), Console.silent()
    )
    dpi = 150
    pages = printed_pages(path, dpi)
    height, width = pages[0].shape
    np.testing.assert_allclose([width, height], np.array(PAGES[page]) / 0.0254 * dpi, atol=1)
    numbers = []
    for index, pixels in enumerate(pages):
        picture = tmp_path / f"{index}.png"
        Image.fromarray(pixels).save(picture)
        for detection in detections_in(picture, KIND):
            numbers.append(detection.number)
            assert detection.side / dpi * 0.0254 == pytest.approx(size, rel=0.001)
    assert sorted(numbers) == [3, 4, 5, 6, 7]
    text = subprocess.run(["pdftotext", str(path), "-"], capture_output=True, text=True).stdout
    for number in range(3, 8):
        assert f"{number} {KIND} side {1000 * size:g} mm" in " ".join(text.split())


def test_sheets_refuse_what_cannot_be_printed(tmp_path):
    path = tmp_path / "targets.pdf"

    def message(**changes) -> str:
        with pytest.raises(UserError) as caught:
            write_target_sheet(TargetSheetOptions(path, **changes), Console.silent())
        return str(caught.value)

    assert "does not fit on a4" in message(target_size=0.2)
    assert "use 0.141 or less" in message(target_size=0.2)
    assert "the numbers 0 to 586" in message(first=580)
    with pytest.raises(UserError, match="name it NAME.pdf"):
        TargetSheetOptions(tmp_path / "targets.png")
    path.write_text("kept")
    assert "is there already" in message()
    assert path.read_text() == "kept"
