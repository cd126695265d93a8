# SPDX-License-Identifier: Apache-2.0
"""Files with cameras as other programs write them, of a few cameras at random places."""

from __future__ import annotations

import copy
import json
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pycolmap

from sugar_capture.camera_readers.entries import KnownCamera
from sugar_capture.features.photographs import Photograph
from sugar_capture.known_cameras import read_cameras, the_cameras

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


CSV_HEADER = "#name,x,y,alt,heading,pitch,roll,f,px,py,k1,k2,k3,k4,t1,t2\n"


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


def bundler(root: Path, poses=POSES, names=NAMES) -> Path:
    lines = ["# Bundle file v0.3", f"{N + 1} 1"]
    for rotation, center in poses:
        lines += [f"{F} {K[0]} {K[1]}"]
        lines += [text_of(row) for row in rotation * [[1], [-1], [-1]]]
        lines += [text_of(-(rotation @ center) * [1, -1, -1])]
    lines += [*("0 0 0",) * 5, "0.1 0.2 0.3", "255 0 0", "1 0 5 10.5 -3.5"]
    (root / "bundle").mkdir(exist_ok=True)
    (root / "bundle" / "bundle.out").write_text("\n".join(lines))
    listed = [f"./images/{name} 0 {F}" for name in names] + ["./images/lost.jpg"]
    (root / "list.txt").write_text("\n".join(listed))
    return root / "bundle" / "bundle.out"


def openmvg(distortion: dict, nested: bool = False, poses=POSES, names=NAMES) -> dict:
    lens = {"width": W, "height": H, "focal_length": F, "principal_point": [321.5, 237.25]}
    data = {"value0": lens, **distortion} if nested else {**lens, **distortion}
    views = [
        {
            "local_path": "",
            "filename": name,
            "width": W,
            "height": H,
            "id_view": n,
            "id_intrinsic": 0,
            "id_pose": n,
        }
        for n, name in enumerate([*names, "lost.jpg"])
    ]
    return {
        "sfm_data_version": "0.3",
        "root_path": "/home/x",
        "views": [
            {
                "key": n,
                "value": {
                    "polymorphic_id": 1073741824,
                    "ptr_wrapper": {"id": 2147483649 + n, "data": view},
                },
            }
            for n, view in enumerate(views)
        ],
        "intrinsics": [
            {
                "key": 0,
                "value": {
                    "polymorphic_id": 2147483649,
                    "polymorphic_name": "x",
                    "ptr_wrapper": {"id": 2147483660, "data": data},
                },
            }
        ],
        "extrinsics": [
            {"key": n, "value": {"rotation": r.tolist(), "center": c.tolist()}}
            for n, (r, c) in enumerate(poses)
        ],
        "structure": [],
        "control_points": [],
    }


def opensfm(camera: dict, poses=POSES, names=NAMES) -> list:
    def shot(rotation, center):
        axis = pycolmap.Rotation3d(rotation)
        angle = 2 * np.arctan2(np.linalg.norm(axis.quat[:3]), axis.quat[3])
        vector = axis.quat[:3] / np.linalg.norm(axis.quat[:3]) * angle
        move = (-rotation @ center).tolist()
        return {"rotation": vector.tolist(), "translation": move, "camera": "v2 x", "gps_dop": 1}

    shots = {name: shot(*pose) for name, pose in zip(names, poses, strict=True)}
    small = {"cameras": {}, "shots": {}, "points": {}}
    size = {"width": W, "height": H}
    return [
        small,
        {
            "cameras": {"v2 x": {**size, **camera}},
            "shots": shots,
            "points": {},
            "reference_lla": {"latitude": 1, "longitude": 2, "altitude": 3},
        },
    ]


def polycam(root: Path, corrected: bool = True, poses=POSES, names=NAMES) -> None:
    folder = root / "keyframes" / ("corrected_cameras" if corrected else "cameras")
    folder.mkdir(parents=True)
    for name, (rotation, center) in zip(names, poses, strict=True):
        pose = np.concatenate([rotation.T * (1, -1, -1), center[:, None]], axis=1)
        values = {f"t_{i}{j}": pose[i, j] for i in range(3) for j in range(4)}
        values |= {"fx": F, "fy": F + 1, "cx": 300.0, "cy": 250.0, "width": W, "height": H}
        values |= {"blur_score": 99.0, "timestamp": 1}
        (folder / name).with_suffix(".json").write_text(json.dumps(values))


def reality_rows(separator=",", poses=POSES, names=NAMES) -> str:
    """Rows of RealityScan's table under ``CSV_HEADER``."""
    rows = ""
    for name, (rotation, center) in zip(names, poses, strict=True):
        c2w = rotation.T * (1, -1, -1)  # looking along -z: Rz(-heading) Rx(pitch) Ry(roll)
        pitch = np.arcsin(c2w[2, 1])
        heading = np.arctan2(c2w[0, 1], c2w[1, 1])
        roll = np.arctan2(-c2w[2, 0], c2w[2, 2])
        angles = np.degrees([heading, pitch, roll])
        values = [*center, *angles, 27, 0.01, -0.02, *K, 0, *P]
        rows += separator.join([name, *(f"{x:.17g}" for x in values)]) + "\n"
    return rows


def rig_xml(poses=POSES, names=NAMES) -> ET.Element:
    """The file of :func:`metashape`, whose last camera belongs to a rig with the first one."""
    r, c = poses[0]
    r_slave, c_slave = poses[-1]
    # Slave to master: both look from their places in the chunk.
    turn = r @ r_slave.T
    place = r @ (c_slave - c)
    root = ET.fromstring(metashape(poses, names))
    cameras = {camera.get("label"): camera for camera in root.iter("camera")}
    slave = cameras[names[-1]]
    slave.remove(slave.find("transform"))
    del slave.attrib["component_id"]
    slave.set("master_id", cameras[names[0]].get("id"))
    slave.set("sensor_id", "1")
    sensors = root.find("chunk/sensors")
    sensor = copy.deepcopy(sensors[0])
    sensor.set("id", "1")
    sensor.set("master_id", "0")
    ET.SubElement(sensor, "rotation").text = text_of(turn)
    ET.SubElement(sensor, "location").text = text_of(place)
    sensors.append(sensor)
    return root


def record3d(poses=POSES) -> dict:
    """Return the contents of Record3D's ``metadata.json``."""
    rows = []
    for rotation, center in poses:
        quaternion = pycolmap.Rotation3d(rotation.T * (1, -1, -1)).quat
        rows.append([*map(float, quaternion), *map(float, center)])
    matrix = np.array([[F, 0, 310], [0, F, 230], [0, 0, 1]])
    return {"w": W, "h": H, "fps": 30, "K": matrix.T.ravel().tolist(), "poses": rows}
