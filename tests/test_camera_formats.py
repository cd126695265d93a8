# SPDX-License-Identifier: Apache-2.0
"""Readers of other programs' cameras: right to the pixel, and what is wrong is one line."""

from __future__ import annotations

import json
import shutil
import xml.etree.ElementTree as ET
from collections.abc import Callable

import numpy as np
import pytest

from sugar_capture.camera_readers.entries import KnownCamera
from sugar_capture.known_cameras import read_cameras, the_cameras
from sugar_utils.errors import UserError
from tests.support.camera_files import (
    CENTERS,
    CSV_HEADER,
    NAMES,
    POSES,
    ROTATIONS,
    F,
    H,
    K,
    N,
    P,
    W,
    bundler,
    metashape,
    openmvg,
    opensfm,
    photographs,
    polycam,
    read,
    reality_rows,
    record3d,
    rig_xml,
    text_of,
    xmp,
)


def points_before(rotation: np.ndarray, center: np.ndarray) -> np.ndarray:
    """World points that a camera sees, up to its corners."""
    x, y = np.meshgrid(np.linspace(-0.6, 0.6, 7), np.linspace(-0.45, 0.45, 5))
    depth = np.linspace(2, 9, x.size)
    view = np.stack([x.ravel(), y.ravel(), np.ones(x.size)], axis=1) * depth[:, None]
    return view @ rotation + center


def seen_by(camera: KnownCamera, points: np.ndarray) -> np.ndarray:
    return camera.lens.img_from_cam((points - camera.center) @ camera.rotation.T)


def assert_same_pixels(found: dict[str, KnownCamera], expected: Callable) -> None:
    """``expected``: pixels of points x / z and y / z in the camera's axes, (N, 2) each."""
    assert sorted(found) == sorted(NAMES)
    for name, (rotation, center) in zip(NAMES, POSES, strict=True):
        points = points_before(rotation, center)
        view = (points - center) @ rotation.T
        wanted = expected(*(view[:, :2] / view[:, 2:]).T)
        np.testing.assert_allclose(seen_by(found[name], points), wanted, atol=1e-6)


def brown(x, y, k=K, p=P):
    """Distortion as OpenCV documents it."""
    r2 = x * x + y * y
    radial = 1 + k[0] * r2 + k[1] * r2**2 + k[2] * r2**3
    bent_x = x * radial + 2 * p[0] * x * y + p[1] * (r2 + 2 * x * x)
    bent_y = y * radial + p[0] * (r2 + 2 * y * y) + 2 * p[1] * x * y
    return bent_x, bent_y


def test_metashape_frame_cameras(tmp_path):
    k1, k2, k3 = K
    extra = (
        f"<cx>3.5</cx><cy>-2.25</cy><b1>1.5</b1><k1>{k1}</k1><k2>{k2}</k2><k3>{k3}</k3>"
        "<p1>0.001</p1><p2>-0.002</p2>"
    )
    labels = [name.removesuffix(".jpg") for name in NAMES]
    (tmp_path / "cameras.xml").write_text(metashape(labels=labels, extra=extra))

    def pixels(x, y):
        # Metashape's manual, appendix D, camera models.
        r2 = x * x + y * y
        radial = 1 + k1 * r2 + k2 * r2**2 + k3 * r2**3
        u = x * radial + 0.001 * (r2 + 2 * x * x) + 2 * -0.002 * x * y
        v = y * radial + -0.002 * (r2 + 2 * y * y) + 2 * 0.001 * x * y
        return np.stack([W / 2 + 3.5 + u * (F + 1.5), H / 2 - 2.25 + v * F], axis=1)

    assert_same_pixels(read(tmp_path), pixels)


@pytest.mark.parametrize("p", [(0.0, 0.0), (0.001, -0.002)])
def test_metashape_fisheye_cameras(tmp_path, p):
    extra = f"<k1>0.05</k1><k2>-0.01</k2><k4>0.001</k4><p1>{p[0]}</p1><p2>{p[1]}</p2>"
    (tmp_path / "doc.xml").write_text(metashape(extra=extra, kind="fisheye"))

    def pixels(x, y):
        r = np.hypot(x, y)
        scale = np.divide(np.arctan(r), r, out=np.ones_like(r), where=r > 0)
        x, y = x * scale, y * scale
        r2 = x * x + y * y
        radial = 1 + 0.05 * r2 - 0.01 * r2**2 + 0.001 * r2**4
        u = x * radial + p[0] * (r2 + 2 * x * x) + 2 * p[1] * x * y
        v = y * radial + p[1] * (r2 + 2 * y * y) + 2 * p[0] * x * y
        return np.stack([W / 2 + u * F, H / 2 + v * F], axis=1)

    assert_same_pixels(read(tmp_path), pixels)


def test_metashape_world_coordinates(tmp_path):
    """With a transform of the chunk cameras are in its world, in its unit."""
    turn, shift, scale = ROTATIONS[3].T, np.array([1.0, 2.0, -3.0]), 2.5
    own = [(r @ turn, turn.T @ (c - shift) / scale) for r, c in POSES]
    world = (
        f'<transform><rotation locked="true">{text_of(turn)}</rotation>'
        f"<translation>{text_of(shift)}</translation><scale>{scale}</scale></transform>"
    )
    (tmp_path / "cameras.xml").write_text(metashape(own, world=world))
    assert_same_pixels(
        read(tmp_path), lambda x, y: np.stack([W / 2 + x * F, H / 2 + y * F], axis=1)
    )


def film_pixels(x, y):
    """Focal length for 36 mm of width; RealityCapture's t1 and t2 are OpenCV's p2 and p1."""
    x, y = brown(x, y, K, P[::-1])
    return np.stack([W / 2 + (x * 27 / 36 + 0.01) * W, H / 2 + (y * 27 / 36 - 0.02) * W], axis=1)


def test_reality_scan_csv(tmp_path):
    (tmp_path / "cameras.csv").write_text(CSV_HEADER + reality_rows())
    (tmp_path / "other.csv").write_text("name,value\na,1\n")
    assert_same_pixels(read(tmp_path), film_pixels)


@pytest.mark.parametrize(
    ("header", "separator", "decimal"),
    [
        ("Name,X,Y,Altitude,Yaw,Pitch,Roll,Focal Length,PX,PY,K1,K2,K3,K4,T1,T2", ",", "."),
        (
            "#Image Name; easting (m); northing (m); height [m]; heading (deg); pitch; roll; f; px;"
            " py; k1; k2; k3; k4; t1; t2",
            ";",
            ",",
        ),
        ("label\tx\ty\tz\tyaw\tpitch\troll\tf35\tppx\tppy\tk1\tk2\tk3\tk4\tt1\tt2", "\t", "."),
        ("name\tx\ty\talt\tyaw\tpitch\troll\tf\tpx\tpy\tk1\tk2\tk3\tk4\tt1\tt2", "\t", ","),
    ],
)
def test_columns_by_other_names_and_separators(tmp_path, header, separator, decimal):
    rows = reality_rows(separator).replace(".jpg", "_jpg").replace(".", decimal)
    (tmp_path / "cameras.csv").write_text(f"{header}\n{rows.replace('_jpg', '.jpg')}")
    assert_same_pixels(read(tmp_path), film_pixels)


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_tables_in_the_encodings_of_windows(tmp_path, encoding):
    rows = (CSV_HEADER + reality_rows()).replace(",", "\t")
    (tmp_path / "cameras.csv").write_text(rows, encoding=encoding)
    assert_same_pixels(read(tmp_path), film_pixels)


def test_rows_without_a_rotation_are_left_out_and_told(tmp_path):
    rows = reality_rows() + "IMG_4.jpg,1,2,3,,,,27,0,0,0,0,0,0,0,0\nIMG_5.jpg\n,,,\nelse.jpg,1\n"
    (tmp_path / "cameras.csv").write_text(CSV_HEADER + rows)
    images = photographs([*NAMES, "IMG_4.jpg", "IMG_5.jpg"])
    known = read_cameras(the_cameras(None, tmp_path), images)
    assert [photograph.name for photograph in known.photographs] == NAMES
    assert known.notes[0].endswith("are without a position or rotation: IMG_4.jpg, IMG_5.jpg")
    assert "of images that are not here: else.jpg" in known.notes[1]


def test_a_table_of_places_alone_is_refused_by_the_names_of_its_columns(tmp_path):
    table = tmp_path / "gps.csv"
    table.write_text("name,x,y,alt\nIMG_0.jpg,1,2,3\n")
    assert the_cameras(None, tmp_path) is None
    with pytest.raises(UserError, match="gps.csv: the table has no columns heading, pitch, roll"):
        the_cameras(str(table), tmp_path)


def test_names_with_spaces_in_a_list_of_bundler(tmp_path):
    bundler(tmp_path)
    listed = (tmp_path / "list.txt").read_text()
    (tmp_path / "list.txt").write_text(listed.replace("IMG_", "scan 1 "))
    names = [name.replace("IMG_", "scan 1 ") for name in NAMES]
    assert sorted(read(tmp_path, names)) == sorted(names)


def test_cameras_of_a_rig_have_the_pose_of_their_master_and_their_sensor(tmp_path):
    root = rig_xml()
    (tmp_path / "cameras.xml").write_bytes(ET.tostring(root))
    found = read(tmp_path)
    for name, (rotation, center) in zip(NAMES, POSES, strict=True):
        np.testing.assert_allclose(found[name].rotation, rotation, atol=1e-9)
        np.testing.assert_allclose(found[name].center, center, atol=1e-9)


def test_a_camera_of_a_rig_without_a_place_in_it_is_told(tmp_path):
    root = rig_xml()
    sensor = root.find("chunk/sensors")[1]
    sensor.remove(sensor.find("location"))
    (tmp_path / "cameras.xml").write_bytes(ET.tostring(root))
    known = read_cameras(the_cameras(None, tmp_path), photographs())
    assert len(known.cameras) == N - 1
    assert known.notes[0].startswith("2 of 5 cameras are without a position or rotation: IMG_3.jpg")


def test_keyframes_of_polycam_without_a_size(tmp_path):
    polycam(tmp_path)
    polycam(tmp_path, corrected=False)
    folder = tmp_path / "keyframes"
    for path in (folder / "corrected_cameras").iterdir():
        frame = json.loads(path.read_text())
        del frame["width"], frame["height"]
        path.write_text(json.dumps(frame))
    # Photographs at half their size: that of the frame as taken fits the principal point.
    small = photographs(width=W // 2, height=H // 2)
    found = read_cameras(the_cameras(None, tmp_path), small).cameras
    assert all((c.lens.width, c.lens.params[0]) == (W / 2, F / 2) for c in found)
    shutil.rmtree(folder / "cameras")
    found = read_cameras(the_cameras(None, tmp_path), photographs()).cameras
    assert all((c.lens.width, c.lens.params[0]) == (W, F) for c in found)


def test_reality_scan_angles_by_hand(tmp_path):
    rows = "a.jpg,1,2,3,90,90,0,36,0,0\nb.jpg,0,0,5,0,0,0,36,0,0\nc.jpg,0,0,0,0,90,0,36,0,0\n"
    (tmp_path / "list.csv").write_text("#name,x,y,alt,heading,pitch,roll,f,px,py\n" + rows)
    found = read(tmp_path, ["a.jpg", "b.jpg", "c.jpg"])
    # East of the place, a tenth to the south (right) and a fifth up.
    seen = seen_by(found["a.jpg"], np.array([[11.0, 1.0, 5.0]]))
    np.testing.assert_allclose(seen, [[W / 2 + 0.1 * W, H / 2 - 0.2 * W]], atol=1e-6)
    # Straight down with north on top.
    seen = seen_by(found["b.jpg"], np.array([[1.0, 1.0, 0.0]]))
    np.testing.assert_allclose(seen, [[W / 2 + 0.2 * W, H / 2 - 0.2 * W]], atol=1e-6)
    # To the north.
    seen = seen_by(found["c.jpg"], np.array([[1.0, 10.0, 0.0]]))
    np.testing.assert_allclose(seen, [[W / 2 + 0.1 * W, H / 2]], atol=1e-6)


def test_reality_scan_xmp(tmp_path):
    for name, pose in zip(NAMES, POSES, strict=True):
        (tmp_path / name).with_suffix(".xmp").write_text(xmp(*pose))
    (tmp_path / "lightroom.xmp").write_text('<x:xmpmeta xmlns:x="adobe:ns:meta/"/>')
    assert_same_pixels(read(tmp_path), film_pixels)


def test_bundler(tmp_path):
    bundler(tmp_path)

    def pixels(x, y):
        # Bundler's manual: p = -P.xy / P.z with y up, pixels from the middle.
        r2 = x * x + y * y
        bent = F * (1 + K[0] * r2 + K[1] * r2**2)
        return np.stack([W / 2 + bent * x, H / 2 - bent * -y], axis=1)

    assert_same_pixels(read(tmp_path), pixels)


OPENMVG_LENSES = {
    "pinhole_radial_k3": {"disto_k3": [*K]},
    "pinhole_brown_t2": {"disto_t2": [*K, *P]},
    "pinhole": {},
    "fisheye": {"fisheye": [0.05, -0.01, 0.0, 0.001]},
}


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("model", OPENMVG_LENSES)
def test_openmvg(tmp_path, model, nested):
    content = openmvg(OPENMVG_LENSES[model], nested)
    (tmp_path / "sfm_data.json").write_text(json.dumps(content))

    def pixels(x, y):
        if model == "fisheye":
            t = np.arctan(r := np.hypot(x, y))
            bent = t * (1 + 0.05 * t**2 - 0.01 * t**4 + 0.001 * t**8)
            scale = np.divide(bent, r, out=np.ones_like(r), where=r > 0)
            x, y = x * scale, y * scale
        elif model != "pinhole":
            x, y = brown(x, y, K, P if "t2" in model else (0, 0))
        # Its pixels count from the middle of the first one.
        return np.stack([321.5 + F * x + 0.5, 237.25 + F * y + 0.5], axis=1)

    assert_same_pixels(read(tmp_path), pixels)


@pytest.mark.parametrize("kind", ["perspective", "brown", "fisheye"])
@pytest.mark.parametrize("place", ["reconstruction.json", "opensfm/reconstruction.json"])
def test_opensfm_and_opendronemap(tmp_path, kind, place):
    one = {"projection_type": kind, "focal": 0.8, "k1": K[0], "k2": K[1]}
    if kind == "brown":
        del one["focal"]
        one |= {"focal_x": 0.8, "focal_y": 0.81, "c_x": 0.01, "c_y": -0.02, "k3": K[2]}
        one |= {"p1": P[0], "p2": P[1]}
    (tmp_path / "opensfm").mkdir()
    (tmp_path / place).write_text(json.dumps(opensfm(one)))

    def pixels(x, y):
        r = np.hypot(x, y)
        if kind == "fisheye":
            t = np.arctan(r)
            scale = np.divide(t, r, out=np.ones_like(r), where=r > 0)
            scale *= 1 + K[0] * t**2 + K[1] * t**4
            return np.stack([W / 2 + 0.8 * W * x * scale, H / 2 + 0.8 * W * y * scale], axis=1)
        if kind == "perspective":
            x, y = brown(x, y, (K[0], K[1], 0), (0, 0))
            return np.stack([W / 2 + 0.8 * W * x, H / 2 + 0.8 * W * y], axis=1)
        x, y = brown(x, y)
        return np.stack([W / 2 + (0.8 * x + 0.01) * W, H / 2 + (0.81 * y - 0.02) * W], axis=1)

    assert_same_pixels(read(tmp_path), pixels)


@pytest.mark.parametrize("corrected", [True, False])
def test_polycam(tmp_path, corrected):
    polycam(tmp_path, corrected)
    assert_same_pixels(
        read(tmp_path), lambda x, y: np.stack([300 + F * x, 250 + (F + 1) * y], axis=1)
    )


@pytest.mark.parametrize("own", [False, True])
def test_record3d(tmp_path, own):
    content = record3d()
    if own:
        content["perFrameIntrinsicCoeffs"] = [[F, F, 310, 230]] * N
        content["K"] = [1] * 9
    (tmp_path / "metadata.json").write_text(json.dumps(content, default=float))
    names = [f"{n}.jpg" for n in range(N)]
    found = dict(zip(NAMES, read(tmp_path, names).values(), strict=True))
    assert_same_pixels(found, lambda x, y: np.stack([310 + F * x, 230 + F * y], axis=1))


def test_record3d_quaternions_by_hand(tmp_path):
    half = np.sqrt(0.5)
    # As the world; a quarter turn about y, to look along -x; and about x, to look along y.
    turns = ([0, 0, 0, 1], [0, half, 0, half], [half, 0, 0, half])
    poses = [[*turn, 1, 2, 3] for turn in turns]
    content = {"w": W, "h": H, "K": [F, 0, 0, 0, F, 0, 310, 230, 1], "poses": poses}
    (tmp_path / "metadata.json").write_text(json.dumps(content))
    found = read(tmp_path, ["0.jpg", "1.jpg", "2.jpg"])
    wanted = [[310 + 0.1 * F, 230 - 0.2 * F]]
    for name, ahead in (("0.jpg", (1, 2, -10)), ("1.jpg", (-10, 2, -1)), ("2.jpg", (1, 10, 2))):
        seen = seen_by(found[name], np.array([np.add((1, 2, 3), ahead)], dtype=float))
        np.testing.assert_allclose(seen, wanted, atol=1e-6)


def damaged(old: str, new: str, text: str) -> str:
    assert old in text
    return text.replace(old, new)


XML, DATA = metashape(), openmvg({"disto_k3": [*K]})
BAD = {
    "cut short": ("cameras.xml", XML[:-300], r"cameras.xml: not valid XML \("),
    "no f": ("cameras.xml", damaged(f"<f>{F:.17g}</f>", "", XML), "sensor 0: has no f;"),
    "no number": ("cameras.xml", damaged(">500<", ">x<", XML), "sensor 0, f: could not convert"),
    "not finite": ("cameras.xml", damaged(">500<", ">nan<", XML), "sensor 0, f: needs 1 finite"),
    "negative": ("cameras.xml", damaged(">500<", ">-5<", XML), "sensor 0: has no positive size"),
    "no size": ("cameras.xml", damaged("<resolution ", "<x ", XML), "sensor 0: has no resolution"),
    "too few": ("cameras.xml", XML.replace(" 0 0 0 1<", "<"), "IMG_0.jpg, transform: needs 16"),
    "no rotation": (
        "cameras.xml",
        metashape([(2 * r, c) for r, c in POSES]),
        "IMG_0.jpg, transform: is no rotation",
    ),
    "mirrored": ("cameras.xml", metashape([(-r, c) for r, c in POSES]), "transform: is no rotat"),
    "sensor": (
        "cameras.xml",
        damaged('sensor id="0"', 'sensor id="5"', XML),
        "IMG_0.jpg: sensor_id 0 is not among the sensors",
    ),
    "spherical": ("cameras.xml", metashape(kind="spherical"), "camera type spherical is not supp"),
    "k4": ("cameras.xml", metashape(extra="<k4>0.1</k4>"), "sensor 0: k4 is not supported"),
    "b2": ("cameras.xml", metashape(extra="<b2>3</b2>"), "sensor 0: b2 is not supported"),
    "p3": ("cameras.xml", metashape(extra="<p3>3</p3>"), "sensor 0: p3 and p4 are not supported"),
    "chunks": (
        "cameras.xml",
        XML.replace("</chunk>", "</chunk><chunk><cameras/></chunk>"),
        "2 chunks with cameras; export a single chunk",
    ),
    "two of one": ("cameras.xml", damaged("IMG_1", "IMG_0", XML), "several cameras of the image"),
    "strangers": (
        "cameras.xml",
        metashape(labels=list("abcd")),
        r"0 of its 4 cameras \(a, b, c and 1 more\) have an image",
    ),
    "csv number": (
        "a.csv",
        CSV_HEADER + "IMG_0.jpg,1,2,3,4,5,6,x,0,0,0,0,0,0,0,0",
        "a.csv, line 2, f: could not convert",
    ),
    "csv short": (
        "a.csv",
        CSV_HEADER + "IMG_0.jpg,1,2,3",
        "1 of 1 cameras are without a position or rotation: IMG_0.jpg",
    ),
    "xmp model": ("IMG_0.xmp", xmp(*POSES[0], model="division"), "division is not supported"),
    "xmp rotation": ("IMG_0.xmp", xmp(2 * ROTATIONS[0], CENTERS[0]), "xcr:Rotation: is no rotat"),
    "xmp field": (
        "IMG_0.xmp",
        damaged("FocalLength35mm", "x", xmp(*POSES[0])),
        "IMG_0.xmp, xcr:FocalLength35mm: needs 1",
    ),
    "xmp skew": ("IMG_0.xmp", damaged('Skew="0"', 'Skew="1"', xmp(*POSES[0])), "xcr:Skew and"),
    "mvg json": ("sfm_data.json", json.dumps(DATA)[:-9], "sfm_data.json, line 1.*not valid JSON"),
    "mvg field": (
        "sfm_data.json",
        damaged("focal_length", "x", json.dumps(DATA)),
        "intrinsic 0: Object missing required field focal_length; spherical",
    ),
    "mvg pose": (
        "sfm_data.json",
        damaged('"center"', '"x"', json.dumps(DATA)),
        "missing required field center - at .*extrinsics",
    ),
    "mvg intrinsic": (
        "sfm_data.json",
        damaged('"id_intrinsic": 0', '"id_intrinsic": 4', json.dumps(DATA)),
        "IMG_0.jpg: id_intrinsic 4 is missing",
    ),
    "mvg nan": (
        "sfm_data.json",
        damaged("500.0", "NaN", json.dumps(DATA)),
        "Expected .*focal_length",
    ),
    "sfm kind": (
        "reconstruction.json",
        json.dumps(opensfm({"projection_type": "spherical"})),
        "projection_type spherical is not supported",
    ),
    "sfm focal": ("reconstruction.json", json.dumps(opensfm({})), "camera v2 x: has no positive"),
    "sfm camera": (
        "reconstruction.json",
        damaged('"camera": "v2 x"', '"camera": "z"', json.dumps(opensfm({"focal": 1}))),
        "shot IMG_0.jpg: camera z is missing",
    ),
    "empty": ("reconstruction.json", '[]"cameras"', "not valid JSON"),
    "record": (
        "metadata.json",
        json.dumps({"w": W, "h": H, "K": [1] * 9, "poses": [[0] * 6]}),
        "metadata.json: .*length >= 7 - at .*poses",
    ),
    "quaternion": (
        "metadata.json",
        json.dumps({"w": W, "h": H, "K": [1] * 9, "poses": [[0] * 7]}),
        "metadata.json, pose 0, quaternion: is no rotation",
    ),
    "list": ("bundle.out", "# Bundle file v0.3\n1 0\n", "no such file"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_wrong_is_said_with_file_and_field(tmp_path, case):
    name, text, message = BAD[case]
    (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=message) as error:
        read(tmp_path)
    assert name in str(error.value) or case == "list"
    assert "\n" not in str(error.value)


def test_bundler_files_that_do_not_fit(tmp_path):
    path = bundler(tmp_path)
    text = path.read_text()
    path.write_text(text[:500])
    with pytest.raises(UserError, match=r"bundle.out, camera of ./images/IMG_1.jpg: needs 15"):
        read(tmp_path)
    path.write_text(text.replace(f"{N + 1} 1\n", "2 1\n"))
    with pytest.raises(UserError, match="bundle.out: 2 cameras, but .*list.txt has 5"):
        read(tmp_path)
