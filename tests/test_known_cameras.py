# SPDX-License-Identifier: Apache-2.0
"""Cameras of other programs: read to the pixel, kept as they are, and refused in one line."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pycolmap
import pytest
from PIL import Image

from gaussian_splatting.sfm import mapping, scene_folder
from gaussian_splatting.sfm.camera_formats import KnownCamera
from gaussian_splatting.sfm.convert_options import ConvertOptions, SfmOptions
from gaussian_splatting.sfm.convert_run import convert
from gaussian_splatting.sfm.known_cameras import find_cameras, read_cameras, the_cameras
from gaussian_splatting.sfm.photographs import Photograph, described_photographs
from gaussian_splatting.sfm.scene_folder import needs_cameras
from sugar_utils.console import Console
from sugar_utils.errors import UserError
from tests.support.command_words import parse
from tests.support.photographed_room import FOCAL, HEIGHT, WIDTH, camera_poses, write_photographs

W, H, F = 640, 480, 500.0
RNG = np.random.default_rng(3)
N = 4
ROTATIONS = [np.linalg.qr(RNG.normal(size=(3, 3)))[0] for _ in range(N)]
ROTATIONS = [r * np.sign(np.linalg.det(r)) for r in ROTATIONS]  # world to camera, x right, y down
CENTERS = RNG.normal(size=(N, 3))
K, P = (0.03, -0.02, 0.005), (0.001, -0.002)
NAMES = [f"IMG_{n}.jpg" for n in range(N)]
POSES = list(zip(ROTATIONS, CENTERS, strict=True))


def photographs(names: list[str] = NAMES, width: int = W, height: int = H) -> list[Photograph]:
    return [
        Photograph(name, Path(name), width, height, None, "", False, "", False) for name in names
    ]


def read(root: Path, names: list[str] = NAMES) -> dict[str, KnownCamera]:
    known = read_cameras(the_cameras(None, root), photographs(names))
    assert known.offset is None
    return {p.name: c for p, c in zip(known.photographs, known.cameras, strict=True)}


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


def text_of(values) -> str:
    return " ".join(f"{x:.17g}" for x in np.ravel(values))


def metashape(
    poses=POSES, labels=NAMES, f=F, size=(W, H), extra="<k1>0</k1>", kind="frame", world=""
) -> str:
    """A file as Metashape 2 writes it, shortened."""
    cameras = ""
    for n, ((rotation, center), label) in enumerate(zip(poses, labels, strict=True)):
        matrix = np.eye(4)
        matrix[:3, :3], matrix[:3, 3] = rotation.T, center
        cameras += f"""
      <camera id="{n}" sensor_id="0" component_id="0" label="{label}">
        <transform>{text_of(matrix)}</transform>
        <orientation>1</orientation>
      </camera>"""
    resolution = f'<resolution width="{size[0]}" height="{size[1]}"/>'
    return f"""<?xml version="1.0" encoding="UTF-8"?>
<document version="2.0.0">
  <chunk label="Chunk 1" enabled="true">
    <sensors next_id="1">
      <sensor id="0" label="unknown" type="{kind}">
        {resolution}
        <property name="layer_index" value="0"/>
        <calibration type="{kind}" class="initial">{resolution}<f>1</f></calibration>
        <calibration type="{kind}" class="adjusted">
          {resolution}
          <f>{f:.17g}</f>
          {extra}
        </calibration>
      </sensor>
    </sensors>
    <components next_id="1" active_id="0"><component id="0" label="Component 1"/></components>
    <cameras next_id="9" next_group_id="0">{cameras}
      <camera id="7" sensor_id="0" label="not aligned"><orientation>1</orientation></camera>
    </cameras>
    {world}
  </chunk>
</document>
"""


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


CSV_HEADER = "#name,x,y,alt,heading,pitch,roll,f,px,py,k1,k2,k3,k4,t1,t2\n"


def film_pixels(x, y):
    """Focal length on film of 36 mm; RealityCapture's t1 and t2 are OpenCV's p2 and p1."""
    x, y = brown(x, y, K, P[::-1])
    return np.stack([W / 2 + (x * 27 / 36 + 0.01) * W, H / 2 + (y * 27 / 36 - 0.02) * W], axis=1)


def test_reality_scan_csv(tmp_path):
    rows = ""
    for name, (rotation, center) in zip(NAMES, POSES, strict=True):
        c2w = rotation.T * (1, -1, -1)  # looking along -z: Rz(-heading) Rx(pitch) Ry(roll)
        pitch = np.arcsin(c2w[2, 1])
        heading = np.arctan2(c2w[0, 1], c2w[1, 1])
        roll = np.arctan2(-c2w[2, 0], c2w[2, 2])
        angles = np.degrees([heading, pitch, roll])
        values = [*center, *angles, 27, 0.01, -0.02, *K, 0, *P]
        rows += f"{name}," + ",".join(f"{x:.17g}" for x in values) + "\n"
    (tmp_path / "cameras.csv").write_text(CSV_HEADER + rows)
    (tmp_path / "other.csv").write_text("name,value\na,1\n")
    assert_same_pixels(read(tmp_path), film_pixels)


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


def xmp(rotation, center, model="brown3t2", k=(*K, 0.0, *P), more="") -> str:
    return f"""<x:xmpmeta xmlns:x="adobe:ns:meta/">
  <rdf:RDF xmlns:rdf="http://www.w3.org/1999/02/22-rdf-syntax-ns#">
    <rdf:Description xcr:Version="3" xcr:PosePrior="locked" xcr:Coordinates="absolute"
       xcr:DistortionModel="{model}" xcr:FocalLength35mm="27" xcr:Skew="0" xcr:AspectRatio="1"
       xcr:PrincipalPointU="0.01" xcr:PrincipalPointV="-0.02" xcr:InTexturing="1" {more}
       xmlns:xcr="http://www.capturingreality.com/ns/xcr/1.1#">
      <xcr:Rotation>{text_of(rotation)}</xcr:Rotation>
      <xcr:Position>{text_of(center)}</xcr:Position>
      <xcr:DistortionCoeficients>{text_of(k)}</xcr:DistortionCoeficients>
    </rdf:Description>
  </rdf:RDF>
</x:xmpmeta>
"""


def test_reality_scan_xmp(tmp_path):
    for name, pose in zip(NAMES, POSES, strict=True):
        (tmp_path / name).with_suffix(".xmp").write_text(xmp(*pose))
    (tmp_path / "lightroom.xmp").write_text('<x:xmpmeta xmlns:x="adobe:ns:meta/"/>')
    assert_same_pixels(read(tmp_path), film_pixels)


def bundler(root: Path) -> Path:
    lines = ["# Bundle file v0.3", f"{N + 1} 1"]
    for rotation, center in POSES:
        lines += [f"{F} {K[0]} {K[1]}"]
        lines += [text_of(row) for row in rotation * [[1], [-1], [-1]]]
        lines += [text_of(-(rotation @ center) * [1, -1, -1])]
    lines += [*("0 0 0",) * 5, "0.1 0.2 0.3", "255 0 0", "1 0 5 10.5 -3.5"]
    (root / "bundle").mkdir(exist_ok=True)
    (root / "bundle" / "bundle.out").write_text("\n".join(lines))
    names = [f"./images/{name} 0 {F}" for name in NAMES] + ["./images/lost.jpg"]
    (root / "list.txt").write_text("\n".join(names))
    return root / "bundle" / "bundle.out"


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


def openmvg(distortion: dict, nested: bool = False) -> dict:
    lens = {"width": W, "height": H, "focal_length": F, "principal_point": [321.5, 237.25]}
    data = {"value0": lens, **distortion} if nested else {**lens, **distortion}
    views = [
        {"local_path": "", "filename": name, "width": W, "height": H, "id_view": n,
         "id_intrinsic": 0, "id_pose": n}
        for n, name in enumerate([*NAMES, "lost.jpg"])
    ]  # fmt: skip
    return {
        "sfm_data_version": "0.3", "root_path": "/home/x",
        "views": [{"key": n, "value": {"polymorphic_id": 1073741824, "ptr_wrapper": {
            "id": 2147483649 + n, "data": view}}} for n, view in enumerate(views)],
        "intrinsics": [{"key": 0, "value": {"polymorphic_id": 2147483649,
            "polymorphic_name": "x", "ptr_wrapper": {"id": 2147483660, "data": data}}}],
        "extrinsics": [{"key": n, "value": {"rotation": r.tolist(), "center": c.tolist()}}
                       for n, (r, c) in enumerate(POSES)],
        "structure": [], "control_points": [],
    }  # fmt: skip


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


def opensfm(camera: dict) -> list:
    def shot(rotation, center):
        axis = pycolmap.Rotation3d(rotation)
        angle = 2 * np.arctan2(np.linalg.norm(axis.quat[:3]), axis.quat[3])
        vector = axis.quat[:3] / np.linalg.norm(axis.quat[:3]) * angle
        move = (-rotation @ center).tolist()
        return {"rotation": vector.tolist(), "translation": move, "camera": "v2 x", "gps_dop": 1}

    shots = {name: shot(*pose) for name, pose in zip(NAMES, POSES, strict=True)}
    small = {"cameras": {}, "shots": {}, "points": {}}
    size = {"width": W, "height": H}
    return [small, {"cameras": {"v2 x": {**size, **camera}}, "shots": shots, "points": {},
                    "reference_lla": {"latitude": 1, "longitude": 2, "altitude": 3}}]  # fmt: skip


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


def polycam(root: Path, corrected: bool = True) -> None:
    folder = root / "keyframes" / ("corrected_cameras" if corrected else "cameras")
    folder.mkdir(parents=True)
    for name, (rotation, center) in zip(NAMES, POSES, strict=True):
        pose = np.concatenate([rotation.T * (1, -1, -1), center[:, None]], axis=1)
        values = {f"t_{i}{j}": pose[i, j] for i in range(3) for j in range(4)}
        values |= {"fx": F, "fy": F + 1, "cx": 300.0, "cy": 250.0, "width": W, "height": H}
        values |= {"blur_score": 99.0, "timestamp": 1}
        (folder / name).with_suffix(".json").write_text(json.dumps(values))


@pytest.mark.parametrize("corrected", [True, False])
def test_polycam(tmp_path, corrected):
    polycam(tmp_path, corrected)
    assert_same_pixels(
        read(tmp_path), lambda x, y: np.stack([300 + F * x, 250 + (F + 1) * y], axis=1)
    )


@pytest.mark.parametrize("own", [False, True])
def test_record3d(tmp_path, own):
    poses = [
        [*pycolmap.Rotation3d(rotation.T * (1, -1, -1)).quat, *center] for rotation, center in POSES
    ]
    matrix = np.array([[F, 0, 310], [0, F, 230], [0, 0, 1]])
    content = {"w": W, "h": H, "fps": 30, "K": matrix.T.ravel().tolist(), "poses": poses}
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


def test_images_by_other_names_and_of_other_sizes(tmp_path):
    labels = ["C:\\scan\\a.JPG", "images/b", "sub/c.png", "d.x"]
    (tmp_path / "cameras.xml").write_text(metashape(labels=labels))
    images = photographs(["a.jpg", "b.JPG", "sub/c.png", "other/c.png", "d.x.jpg"], W // 2, H // 2)
    known = read_cameras(the_cameras(None, tmp_path), images)
    assert [p.name for p in known.photographs] == ["a.jpg", "b.JPG", "sub/c.png", "d.x.jpg"]
    assert all((c.lens.width, c.lens.params[0]) == (W / 2, F / 2) for c in known.cameras)
    assert len(known.lens_groups()) == 1


def test_far_coordinates_are_moved_by_whole_units(tmp_path):
    far = np.array([500_123.4, 5_400_000.0, 321.0])
    (tmp_path / "cameras.xml").write_text(metashape([(r, c + far) for r, c in POSES]))
    known = read_cameras(the_cameras(None, tmp_path), photographs())
    assert known.offset == [round(x) for x in far + CENTERS.mean(axis=0)]
    for camera, center in zip(known.cameras, CENTERS, strict=True):
        np.testing.assert_allclose(camera.center + known.offset, center + far, atol=1e-8)


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
    "no rotation": ("cameras.xml", metashape([(2 * r, c) for r, c in POSES]),
                    "IMG_0.jpg, transform: is no rotation"),
    "mirrored": ("cameras.xml", metashape([(-r, c) for r, c in POSES]), "transform: is no rotat"),
    "sensor": ("cameras.xml", damaged('sensor id="0"', 'sensor id="5"', XML),
               "IMG_0.jpg: sensor_id 0 is not among the sensors"),
    "spherical": ("cameras.xml", metashape(kind="spherical"), "camera type spherical is not supp"),
    "k4": ("cameras.xml", metashape(extra="<k4>0.1</k4>"), "sensor 0: k4 is not supported"),
    "b2": ("cameras.xml", metashape(extra="<b2>3</b2>"), "sensor 0: b2 is not supported"),
    "p3": ("cameras.xml", metashape(extra="<p3>3</p3>"), "sensor 0: p3 and p4 are not supported"),
    "chunks": ("cameras.xml", XML.replace("</chunk>", "</chunk><chunk><cameras/></chunk>"),
               "2 chunks with cameras; export a single chunk"),
    "two of one": ("cameras.xml", damaged("IMG_1", "IMG_0", XML), "several cameras of the image"),
    "strangers": ("cameras.xml", metashape(labels=list("abcd")),
                  r"0 of its 4 cameras \(a, b, c and 1 more\) have an image"),
    "csv number": ("a.csv", CSV_HEADER + "IMG_0.jpg,1,2,3,4,5,6,x,0,0,0,0,0,0,0,0",
                   "a.csv, line 2, f: could not convert"),
    "csv short": ("a.csv", CSV_HEADER + "IMG_0.jpg,1,2,3", "line 2, heading: needs 1 finite"),
    "xmp model": ("IMG_0.xmp", xmp(*POSES[0], model="division"), "division is not supported"),
    "xmp rotation": ("IMG_0.xmp", xmp(2 * ROTATIONS[0], CENTERS[0]), "xcr:Rotation: is no rotat"),
    "xmp field": ("IMG_0.xmp", damaged("FocalLength35mm", "x", xmp(*POSES[0])),
                  "IMG_0.xmp, xcr:FocalLength35mm: needs 1"),
    "xmp skew": ("IMG_0.xmp", damaged('Skew="0"', 'Skew="1"', xmp(*POSES[0])), "xcr:Skew and"),
    "mvg json": ("sfm_data.json", json.dumps(DATA)[:-9], "sfm_data.json, line 1.*not valid JSON"),
    "mvg field": ("sfm_data.json", damaged("focal_length", "x", json.dumps(DATA)),
                  "intrinsic 0: has no size, focal_length and principal_point; spherical"),
    "mvg pose": ("sfm_data.json", damaged('"center"', '"x"', json.dumps(DATA)),
                 "missing required field center - at .*extrinsics"),
    "mvg intrinsic": ("sfm_data.json", damaged('"id_intrinsic": 0', '"id_intrinsic": 4',
                      json.dumps(DATA)), "IMG_0.jpg: id_intrinsic 4 is missing"),
    "mvg nan": ("sfm_data.json", damaged("500.0", "NaN", json.dumps(DATA)),
                "Expected .*focal_length"),
    "sfm kind": ("reconstruction.json", json.dumps(opensfm({"projection_type": "spherical"})),
                 "projection_type spherical is not supported"),
    "sfm focal": ("reconstruction.json", json.dumps(opensfm({})), "camera v2 x: has no positive"),
    "sfm camera": ("reconstruction.json", damaged('"camera": "v2 x"', '"camera": "z"',
                   json.dumps(opensfm({"focal": 1}))), "shot IMG_0.jpg: camera z is missing"),
    "empty": ("reconstruction.json", '[]"cameras"', "not valid JSON"),
    "record": ("metadata.json", json.dumps({"w": W, "h": H, "K": [1] * 9, "poses": [[0] * 6]}),
               "metadata.json: .*length >= 7 - at .*poses"),
    "quaternion": ("metadata.json", json.dumps({"w": W, "h": H, "K": [1] * 9, "poses": [[0] * 7]}),
                   "metadata.json, pose 0, quaternion: is no rotation"),
    "list": ("bundle.out", "# Bundle file v0.3\n1 0\n", "no such file"),
}  # fmt: skip


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


def test_which_cameras_are_meant(tmp_path):
    (tmp_path / "a.xml").write_text(XML)
    (tmp_path / "b.xml").write_text(XML)
    (tmp_path / "other.xml").write_text("<annotation/>")
    with pytest.raises(UserError, match=r"2 sets of cameras \(.*a.xml, .*b.xml\); name one with"):
        the_cameras(None, tmp_path)
    assert the_cameras("none", tmp_path) is None
    chosen = the_cameras(str(tmp_path / "b.xml"), tmp_path)
    assert chosen.name == f"Metashape: {tmp_path / 'b.xml'}"
    assert len(find_cameras(str(tmp_path), Path("elsewhere"))) == 2
    for wrong in ("other.xml", "gone.xml"):
        with pytest.raises(UserError, match=f"--cameras .*{wrong}: has no cameras of Metashape, R"):
            the_cameras(str(tmp_path / wrong), tmp_path)


def test_a_photograph_of_another_shape_is_refused(tmp_path):
    (tmp_path / "cameras.xml").write_text(XML)
    upright = [replace(p, turned=True) for p in photographs(width=H, height=W)]
    with pytest.raises(UserError, match="is 640 x 480 px, but IMG_0.jpg is 480 x 640 px when turn"):
        read_cameras(the_cameras(None, tmp_path), upright)


SMALL = SfmOptions(extraction_size=WIDTH, max_features=500)
ROOM = 7


class Heard(Console):
    """A console that remembers what it was told."""

    def __init__(self) -> None:
        super().__init__(stream=Console.silent()._stream, terminal=False)
        self.lines: list[str] = []

    def info(self, message: str) -> None:
        self.lines.append(message)


def room_xml(shift=(0.0, 0.0, 0.0), focal: float = FOCAL, n: int = ROOM) -> str:
    poses = [(r, c + shift) for r, c in camera_poses(ROOM)][:n]
    labels = [f"IMG {k}" for k in range(1, n + 1)]
    return metashape(poses, labels, focal, (WIDTH, HEIGHT))


@pytest.fixture(scope="module")
def room(tmp_path_factory) -> Path:
    """Photographs in ``images``, with Metashape's cameras of all but the last beside them."""
    root = tmp_path_factory.mktemp("known") / "room"
    write_photographs(root / "images", ROOM)
    (root / "cameras.xml").write_text(room_xml(n=ROOM - 1))
    return root


@pytest.fixture(scope="module")
def converted(room, tmp_path_factory) -> tuple[Path, list[str]]:
    root, console = tmp_path_factory.mktemp("converted") / "room", Heard()
    shutil.copytree(room, root)
    convert(ConvertOptions(root, sfm=SMALL), console)
    return root, console.lines


def model_bytes(root: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (root / "sparse" / "0").iterdir()}


def assert_given_poses(root: Path, shift=(0.0, 0.0, 0.0), n: int = ROOM - 1) -> None:
    model = pycolmap.Reconstruction(str(root / "sparse" / "0"))
    found = {image.name: image for image in model.images.values()}
    assert len(found) == n
    for k, (rotation, center) in enumerate(camera_poses(ROOM)[:n], start=1):
        image = found[f"IMG {k}.png"]
        np.testing.assert_allclose(image.cam_from_world().rotation.matrix(), rotation, atol=1e-9)
        np.testing.assert_allclose(image.projection_center(), center + shift, atol=1e-9)
    assert model.num_points3D() > 100
    assert model.compute_mean_reprojection_error() < 1


def test_poses_are_kept_and_points_are_triangulated(converted):
    root, lines = converted
    assert f"cameras of Metashape: {root / 'cameras.xml'}, 6 of 7 photographs" in lines
    assert_given_poses(root)
    outcome = json.loads((root / "distorted" / "outcome.json").read_text())
    assert outcome["cameras"] == f"Metashape: {root / 'cameras.xml'}"
    assert outcome["offset"] is None
    assert outcome["registered"] == outcome["photographs"] == 6
    # Points lie on the three posters.
    points = pycolmap.Reconstruction(str(root / "sparse" / "0")).points3D.values()
    away = [np.abs(point.xyz).min() for point in points]
    assert np.median(away) < 0.01


def test_a_changed_file_makes_the_model_anew(converted, tmp_path):
    root = tmp_path / "room"
    shutil.copytree(converted[0], root)
    assert not needs_cameras(root)
    console = Heard()
    assert convert(ConvertOptions(root, sfm=SMALL), console).seconds == 0
    assert console.lines[-1].startswith("finished before: 6 of 6")
    far = np.array([40_000.0, 0.0, 0.0])
    (root / "cameras.xml").write_text(room_xml(far, n=ROOM))
    assert needs_cameras(root)
    convert(ConvertOptions(root, sfm=SMALL), console)
    offset = json.loads((root / "distorted" / "outcome.json").read_text())["offset"]
    assert offset == [40_002, 2, 1]
    assert any(f"; {[40_002.0, 2.0, 1.0]} subtracted from all places" in x for x in console.lines)
    assert_given_poses(root, far - offset, ROOM)
    assert not needs_cameras(root)


@pytest.mark.parametrize(
    ("place", "name"), [(mapping, "map_photographs"), (scene_folder, "publish")]
)
def test_what_was_cut_short_goes_on_to_the_same_bits(
    place, name, room, converted, tmp_path, monkeypatch
):
    root = tmp_path / "room"
    shutil.copytree(room, root)

    def dies(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(place, name, dies)
    with pytest.raises(KeyboardInterrupt):
        convert(ConvertOptions(root, sfm=SMALL), Heard())
    monkeypatch.undo()
    convert(ConvertOptions(root, sfm=SMALL), Heard())
    assert model_bytes(root) == model_bytes(converted[0])


def test_cameras_of_other_images_are_refused(room, tmp_path):
    root = tmp_path / "room"
    shutil.copytree(room, root)
    poses = list(reversed([(r, c) for r, c in camera_poses(ROOM)]))
    turned = [(np.roll(r, 1, axis=0), c) for r, c in poses]
    labels = [f"IMG {k}" for k in range(1, ROOM + 1)]
    (root / "cameras.xml").write_text(metashape(turned, labels, FOCAL, (WIDTH, HEIGHT)))
    with pytest.raises(UserError, match="cameras.xml: its cameras do not fit the photographs, of"):
        convert(ConvertOptions(root, sfm=SMALL), Heard())
    result = convert(ConvertOptions(root, sfm=replace(SMALL, cameras="none")), Heard())
    assert result.n_registered == ROOM
    assert not needs_cameras(root)


def test_captures_of_phones_are_scenes(tmp_path):
    assert parse(ConvertOptions, ["-s", "x", "--cameras", "a.xml"]).sfm.cameras == "a.xml"
    root = tmp_path / "scan"
    polycam(root)
    Image.new("RGB", (8, 8)).save(root / "thumbnail.jpg")
    write_photographs(root / "keyframes" / "corrected_images", N, name="IMG_{}.png")
    assert needs_cameras(root)
    source = scene_folder.find_source(root)
    assert source.folder == root / "keyframes" / "corrected_images"
    scene_folder.note(source)
    assert scene_folder.find_source(root) == source
    record = tmp_path / "other"
    write_photographs(record / "rgb", N, name="{}.png")
    assert not needs_cameras(record)
    (record / "metadata.json").write_text("{}")
    assert scene_folder.find_source(record).folder == record / "rgb"


@pytest.mark.slow
def test_a_real_scene_with_the_cameras_of_metashape(scenes_dir, tmp_path):
    """A dozen photographs of the fox with the cameras of its COLMAP model."""
    model = pycolmap.Reconstruction(str(scenes_dir / "fox" / "sparse" / "0"))
    images = sorted(model.images.values(), key=lambda image: image.name)[:12]
    (tmp_path / "fox" / "images").mkdir(parents=True)
    poses = []
    for image in images:
        shutil.copy(scenes_dir / "fox" / "images" / image.name, tmp_path / "fox" / "images")
        poses.append((image.cam_from_world().rotation.matrix(), image.projection_center()))
    lens = model.cameras[images[0].camera_id]
    fx, fy, cx, cy = lens.params
    size = lens.width, lens.height
    extra = f"<cx>{cx - size[0] / 2}</cx><cy>{cy - size[1] / 2}</cy><b1>{fx - fy}</b1>"
    text = metashape(poses, [image.name for image in images], fy, size, extra)
    (tmp_path / "fox" / "cameras.xml").write_text(text)
    sfm = SfmOptions(extraction_size=800, max_features=2000)
    result = convert(ConvertOptions(tmp_path / "fox", sfm=sfm), Heard())
    assert result.n_registered == 12
    assert result.n_points > 500
    assert result.reprojection_error < 1.5
    made = pycolmap.Reconstruction(str(tmp_path / "fox" / "sparse" / "0"))
    found = {image.name: image for image in made.images.values()}
    for image, (rotation, center) in zip(images, poses, strict=True):
        pose = found[image.name].cam_from_world()
        np.testing.assert_allclose(pose.rotation.matrix(), rotation, atol=1e-9)
        np.testing.assert_allclose(found[image.name].projection_center(), center, atol=1e-9)


def test_described_photographs_have_the_sizes_that_cameras_are_fitted_to(room):
    found = described_photographs(room / "images", True)
    known = read_cameras(the_cameras(None, room), found)
    assert [p.name for p in known.photographs] == [f"IMG {k}.png" for k in range(1, ROOM)]
