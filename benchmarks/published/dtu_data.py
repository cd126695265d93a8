# SPDX-License-Identifier: Apache-2.0
"""The DTU data set as people download it: photographs with cameras, and the true points.

The photographs come in one of two layouts, both made for neural surfaces from DTU's MVS data:

- ``scan24/image/*.png``, ``mask/*.png`` and ``cameras.npz`` or ``cameras_sphere.npz`` (the data of
  IDR and NeuS; folders may be named ``dtu_scan24``);
- ``scan24/images/*.png``, ``mask/*.png``, the same ``.npz`` and a COLMAP model in ``sparse/0`` (the
  data that Gaussian splatting programs hand on).

``world_mat_I`` of the ``.npz`` projects millimetres of DTU's world to pixels of photograph I; with
``scale_mat_I`` behind it, points of a world in which the object lies in the unit sphere.

What is true comes from DTU itself: ``Points/stl/stl024_total.ply`` (of "Points") and
``ObsMask/ObsMask24_10.mat``, ``ObsMask/Plane24.mat`` (of "SampleSet").
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from zipfile import BadZipFile

import numpy as np
from plyfile import PlyData, PlyParseError
from scipy.io import loadmat
from scipy.linalg import rq

from benchmarks.published.known_poses import KnownPose, write_model
from benchmarks.published.similarity import Similarity, robust_similarity
from gaussian_splatting.data.colmap import find_model
from gaussian_splatting.posing.photographs import picture_files
from sugar_utils.errors import UserError

SCANS = (24, 37, 40, 55, 63, 65, 69, 83, 97, 105, 106, 110, 114, 118, 122)
"""The fifteen scans that surface papers report."""

_CAMERA_FILES = ("cameras.npz", "cameras_sphere.npz")
_IMAGE_FOLDERS = ("images", "image")
_TRUTH_DEPTH = 3
_MAX_MISS = 0.01
"""Camera centres may miss the data set's by this share of their spread."""


@dataclass(frozen=True)
class Scan:
    """One scan as downloaded.

    Attributes:
        number: DTU's number of it.
        root: Its folder.
        images: Folder of the photographs.
        cameras: The ``.npz`` file.
    """

    number: int
    root: Path
    images: Path
    cameras: Path

    @property
    def photographs(self) -> list[Path]:
        """In the order of the cameras."""
        return picture_files(self.images, recursive=False)


@dataclass(frozen=True)
class Truth:
    """What a scan's mesh is compared with; millimetres of DTU's world.

    Attributes:
        points: The structured-light scan. (P, 3)
        observed: Voxels that the scanner saw. (X, Y, Z) bool
        box: Corners of that volume. (2, 3)
        resolution: Side of its voxels.
        plane: Points with a . (x, y, z, 1) > 0 lie above the table. (4,)
    """

    points: np.ndarray
    observed: np.ndarray
    box: np.ndarray
    resolution: float
    plane: np.ndarray


def find_scans(data: Path, wanted: Sequence[int]) -> list[Scan]:
    """The wanted scans that are there.

    Raises:
        UserError: There is none, or one is incomplete.
    """
    folders = {}
    for folder in [data, *sorted(data.glob("*")), *sorted(data.glob("*/*"))]:
        match = re.fullmatch(r"(?:dtu_)?scan(\d+)", folder.name, re.IGNORECASE)
        if match and any((folder / name).is_dir() for name in _IMAGE_FOLDERS):
            folders.setdefault(int(match[1]), folder)
    found = [_scan(number, folders[number]) for number in wanted if number in folders]
    if not found:
        raise UserError(
            f"{data}: holds none of the scans {', '.join(map(str, wanted))}; expected folders such "
            "as scan24 with images/ (or image/), mask/ and cameras.npz"
        )
    return found


def _scan(number: int, root: Path) -> Scan:
    images = next(root / name for name in _IMAGE_FOLDERS if (root / name).is_dir())
    cameras = [root / name for name in _CAMERA_FILES if (root / name).is_file()]
    if not cameras:
        raise UserError(
            f"{root}: has neither {' nor '.join(_CAMERA_FILES)}, which say where DTU's world is; "
            "download the data as prepared for IDR, NeuS or 2DGS"
        )
    scan = Scan(number, root, images, cameras[0])
    if not scan.photographs:
        raise UserError(f"{images}: no photograph; download the scan again")
    return scan


def find_truth(data: Path) -> Path:
    """The folder, ``data`` or one below it, with the masks of the scanner in ``ObsMask``.

    Raises:
        UserError: They are not there.
    """
    for depth in range(_TRUTH_DEPTH + 1):
        for folder in sorted(data.glob("/".join(["*"] * depth)) if depth else [data]):
            if (folder / "ObsMask").is_dir():
                return folder
    raise UserError(
        f"{data}: no folder ObsMask in it; download SampleSet and Points of the DTU MVS data, and "
        "give their folder with --truth"
    )


def points_file(folder: Path, number: int) -> Path:
    """The true points of a scan.

    Args:
        folder: As :func:`find_truth` returns it; ``Points`` is there, too, or up to two above.
        number: Of the scan.

    Raises:
        UserError: They are not there.
    """
    name = Path("Points") / "stl" / f"stl{number:03d}_total.ply"
    for place in (folder, *folder.parents[:2]):
        if (place / name).is_file():
            return place / name
    raise UserError(f"{folder / name}: no such file; unpack DTU's Points.zip there")


def read_truth(folder: Path, number: int) -> Truth:
    """What is true of a scan; arguments as of :func:`points_file`.

    Raises:
        UserError: A file is missing or damaged.
    """
    points = points_file(folder, number)
    seen = _matrices(folder / "ObsMask" / f"ObsMask{number}_10.mat", "ObsMask", "BB", "Res")
    (plane,) = _matrices(folder / "ObsMask" / f"Plane{number}.mat", "P")
    return Truth(
        read_points(points),
        seen[0].astype(bool),
        seen[1].astype(np.float64),
        float(np.squeeze(seen[2])),
        plane.astype(np.float64).reshape(4),
    )


def _matrices(path: Path, *names: str) -> list[np.ndarray]:
    try:
        values = loadmat(str(path))
        return [values[name] for name in names]
    except FileNotFoundError as error:
        raise UserError(f"{path}: no such file; unpack DTU's SampleSet.zip there") from error
    except Exception as error:  # scipy raises whatever its parser stumbles over
        raise UserError(f"{path}: damaged ({error}); unpack it again") from error


def read_points(path: Path) -> np.ndarray:
    """Points of a PLY file. (P, 3) float64

    Raises:
        UserError: It is damaged.
    """
    try:
        table = PlyData.read(str(path))["vertex"].data
        return np.stack([np.asarray(table[axis], dtype=np.float64) for axis in "xyz"], axis=1)
    except (PlyParseError, OSError, ValueError, KeyError) as error:
        raise UserError(f"{path}: damaged ({error}); download it again") from error


def true_poses(scan: Scan) -> list[KnownPose]:
    """Intrinsics and poses of the photographs in the world of the unit sphere, in their order.

    Raises:
        UserError: The file has no camera for a photograph.
    """
    poses = []
    for path, (world, scale) in zip(scan.photographs, _camera_matrices(scan), strict=True):
        projection = (world @ scale)[:3]
        k, rotation = rq(projection[:, :3])
        signs = np.diag(np.sign(np.diag(k)))
        k, rotation = k @ signs, signs @ rotation
        translation = np.linalg.solve(k, projection[:, 3])
        if np.linalg.det(rotation) < 0:
            rotation, translation = -rotation, -translation
        poses.append(KnownPose(path.name, k / k[2, 2], rotation, translation))
    return poses


def true_centers(scan: Scan) -> np.ndarray:
    """Camera centres of the photographs, in their order. (N, 3) millimetres of DTU's world"""
    return np.stack([
        -np.linalg.solve(world[:3, :3], world[:3, 3]) for world, _ in _camera_matrices(scan)
    ])  # fmt: skip


def _camera_matrices(scan: Scan) -> list[tuple[np.ndarray, np.ndarray]]:
    n = len(scan.photographs)
    try:
        with np.load(scan.cameras) as stored:
            return [
                (stored[f"world_mat_{i}"].astype(float), stored[f"scale_mat_{i}"].astype(float))
                for i in range(n)
            ]
    except (OSError, ValueError, KeyError, BadZipFile) as error:
        raise UserError(
            f"{scan.cameras}: damaged, or not of these {n} photographs ({error}); download the "
            "scan again"
        ) from error


def prepared_scene(scan: Scan, folder: Path, notify: Callable[[str], None]) -> Path:
    """A scene that the trainers read: the scan itself, or one with a model made of its cameras.

    Args:
        scan: The scan.
        folder: Where to make one, if the scan has no COLMAP model.
        notify: Is told what is done.

    Raises:
        UserError: Too little is found in the photographs to make a model.
    """
    if find_model(scan.root) is not None and scan.images.name == "images":
        return scan.root
    if find_model(folder) is None:
        notify(f"scan {scan.number}: triangulating points for the cameras of {scan.cameras.name}")
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(scan.images, folder / "images")
        if (scan.root / "mask").is_dir():
            shutil.copytree(scan.root / "mask", folder / "mask")
        write_model(folder, true_poses(scan))
    return folder


def to_millimetres(scan: Scan, centers: dict[str, np.ndarray]) -> Similarity:
    """From the world in which a scan was trained to DTU's, by where the cameras are in both.

    Args:
        scan: The scan.
        centers: Camera centres by the names of photographs. (3,) each

    Raises:
        UserError: The cameras are not those of the scan.
    """
    names = [path.name for path in scan.photographs]
    true = true_centers(scan)
    rows = [i for i, name in enumerate(names) if name in centers]
    if len(rows) < 3:
        raise UserError(f"{scan.root}: only {len(rows)} of its cameras are known by their names")
    found, missed = robust_similarity(np.stack([centers[names[i]] for i in rows]), true[rows])
    spread = np.linalg.norm(true - true.mean(axis=0), axis=1).max()
    if float(np.median(missed)) > _MAX_MISS * spread:
        raise UserError(
            f"{scan.root}: its COLMAP cameras miss those of {scan.cameras.name} by "
            f"{np.median(missed):.3g} mm; the two are not of the same photographs"
        )
    return found
