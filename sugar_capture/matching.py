# SPDX-License-Identifier: Apache-2.0
"""Features of photographs, and comparing them: which pairs, in parts, against the poses found."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import sqlite3
import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from gaussian_splatting.data.cameras import ViewMask
from gaussian_splatting.data.images import COUNTS, decode_mask
from sugar_capture.photographs import Photograph, camera_groups, read_grey
from sugar_utils.errors import UserError
from sugar_utils.files import atomic_path
from sugar_utils.libraries import load_pycolmap
from sugar_utils.memory import available_bytes

SMALL_GROUP = 10  # cameras with fewer photographs get one parameter of distortion
FALLBACK_FOCAL = 1.2  # in longer sides, where EXIF tells none: 45 degrees, as in COLMAP
_BYTES_PER_PIXEL = 256  # most that a SIFT extractor holds, first octave at twice the size

_OF_CPP = re.compile(r"\[\w+\.(cc|h):\d+\]")  # how messages of COLMAP's own checks begin
Rig = tuple[Sequence[tuple[Any, np.ndarray]], Sequence[Sequence[int]]]
"""Lenses with the rotation from the first one's axes to theirs, (3, 3), and for each moment the
places of the photographs that they took in it."""
Matcher = Literal["auto", "exhaustive", "sequential", "similar"]
MAX_EXHAUSTIVE = 150  # photographs up to which all pairs are compared
COMPARED_FEATURES = 256  # features of a photograph by which similar ones are found
_PART = 64
MAX_RATIO = 0.8  # most: distance of the best match over that of the second best (Lowe 2004)
_BLOCK = 32
MAX_ERROR = 0.005  # epipolar distance as a share of the longest side; above, the pair contradicts
CONTRADICTING_SHARE = 0.5  # share of the pairs of an image that must contradict its pose


def database_name(index: int) -> str:
    """Name in the database of the photograph at a place: lists of pairs end names at spaces."""
    return f"{index + 1:06}"


@contextlib.contextmanager
def database_errors(path: Path) -> Iterator[None]:
    """A context in which COLMAP uses a database."""
    try:
        yield
    except (RuntimeError, ValueError) as error:  # pycolmap raises what its C++ threw
        if isinstance(error, ValueError) and not _OF_CPP.match(str(error)):
            raise
        cause = str(error).rstrip(".")
        raise UserError(
            f"cannot go on with {path}: {cause}; free some space, and remove the file if that does "
            "not help"
        ) from error


def is_whole(path: Path, n_photographs: int) -> bool:
    """Whether a file is an undamaged database of so many photographs."""
    if not path.is_file():
        return False
    try:
        with contextlib.closing(sqlite3.connect(path)) as database:
            checked = database.execute("PRAGMA quick_check(1)").fetchone()
            found = database.execute("SELECT COUNT(*) FROM images").fetchone()
    except sqlite3.Error:
        return False
    return (checked, found) == (("ok",), (n_photographs,))


def create_database(
    path: Path,
    photographs: Sequence[Photograph],
    camera_model: str | None,
    lenses: Sequence[tuple[Any, Sequence[int]]] | None = None,
    rigs: Sequence[Rig] | None = None,
) -> None:
    """Write a database of cameras and photographs without features, complete or not at all.

    Photographs have the numbers 1, 2, ... in their order, and share lenses as their headers say.

    Args:
        camera_model: COLMAP's name of the lens model; None for OPENCV, and SIMPLE_RADIAL where a
            camera took fewer than ``SMALL_GROUP``.
        lenses: Known ones, and the places of the photographs that each took.
        rigs: Where one took several photographs at once.
    """
    pycolmap = load_pycolmap()
    if camera_model is not None and camera_model not in pycolmap.CameraModelId.__members__:
        known = ", ".join(sorted(pycolmap.CameraModelId.__members__))
        raise UserError(f"--camera {camera_model} is unknown; choose one of {known}")
    with atomic_path(path) as temporary, pycolmap.Database.open(str(temporary)) as database:
        lenses = lenses or _assumed_lenses(photographs, camera_model)
        singles = (([(lens, np.eye(3))], [[k] for k in group]) for lens, group in lenses)
        frames = {}
        for own, moments in rigs or singles:
            rig = pycolmap.Rig()
            sensors = []
            for camera, rotation in own:
                kind = pycolmap.SensorType.CAMERA
                sensors.append(pycolmap.sensor_t(kind, database.write_camera(camera)))
                if len(sensors) == 1:
                    rig.add_ref_sensor(sensors[0])
                else:
                    pose = pycolmap.Rigid3d(pycolmap.Rotation3d(rotation), np.zeros(3))
                    rig.add_sensor(sensors[-1], pose)
            frames |= dict.fromkeys(map(tuple, moments), (sensors, database.write_rig(rig)))
        for places, (sensors, rig_id) in sorted(frames.items()):
            frame = pycolmap.Frame()
            frame.rig_id = rig_id
            for index, sensor in zip(places, sensors, strict=True):
                image = pycolmap.Image(name=database_name(index), camera_id=sensor.id)
                frame.add_data_id(pycolmap.data_t(sensor, database.write_image(image)))
            database.write_frame(frame)


def _assumed_lenses(
    photographs: Sequence[Photograph], camera_model: str | None
) -> Iterator[tuple[Any, list[int]]]:
    pycolmap = load_pycolmap()
    for group in camera_groups(photographs):
        first = photographs[group[0]]
        fallback = "OPENCV" if len(group) >= SMALL_GROUP else "SIMPLE_RADIAL"
        focal = first.focal or FALLBACK_FOCAL * max(first.width, first.height)
        lens = camera_model or fallback, focal, first.width, first.height
        camera = pycolmap.Camera.create_from_model_name(pycolmap.INVALID_CAMERA_ID, *lens)
        camera.has_prior_focal_length = first.focal is not None
        yield camera, group


def extract_features(
    path: Path,
    photographs: Sequence[Photograph],
    masks: Sequence[ViewMask | None],
    longest_side: int,
    max_features: int,
    advance: Callable[[int], None],
) -> None:
    """Find the features of all photographs that have none in the database yet, several at a time.

    Args:
        longest_side: Size at which features are looked for; places count in pixels of the whole.
    """
    pycolmap = load_pycolmap()
    options = pycolmap.FeatureExtractionOptions()
    options.use_gpu = False
    options.num_threads = 1
    options.max_image_size = longest_side
    options.sift.max_num_features = max_features

    def find(index: int) -> tuple[int, np.ndarray, Any]:
        return index, *_features_of(photographs[index], masks[index], longest_side, options)

    with pycolmap.Database.open(str(path)) as database:
        n = len(photographs)
        waiting = [index for index in range(n) if not database.exists_descriptors(index + 1)]
        done = n - len(waiting)
        advance(done)
        room = available_bytes() or 2 << 30
        each = _BYTES_PER_PIXEL * longest_side**2
        n_workers = max(1, min(os.cpu_count() or 1, room // 2 // each))
        for index, keypoints, descriptors in _in_order(find, waiting, n_workers):
            # Both or none, should the process be killed between them.
            transaction = pycolmap.DatabaseTransaction(database)
            # There are some if the disk was full when their descriptors should have followed.
            is_known = database.exists_keypoints(index + 1)
            write = database.update_keypoints if is_known else database.write_keypoints
            write(index + 1, keypoints)
            database.write_descriptors(index + 1, descriptors)
            del transaction
            done += 1
            advance(done)


def _features_of(
    photograph: Photograph, mask: ViewMask | None, longest_side: int, options: Any
) -> tuple[np.ndarray, Any]:
    """Keypoints (N, 4) float32: x, y, scale and orientation; and their descriptors."""
    pycolmap = load_pycolmap()
    grey = np.ascontiguousarray(read_grey(photograph.path, longest_side))
    height, width = grey.shape
    extractor = pycolmap.FeatureExtractor.create(options, pycolmap.Device.cpu)
    found, descriptors = extractor.extract_from_uint8_array(grey)
    keypoints = pycolmap.keypoints_to_matrix(found).reshape(-1, 4)
    if mask is not None:
        counts = decode_mask(mask, width, height, upright=True) >= COUNTS
        x, y = keypoints[:, :2].astype(int).T
        kept = counts[y.clip(0, height - 1), x.clip(0, width - 1)]
        keypoints = keypoints[kept]
        descriptors = pycolmap.FeatureDescriptors(descriptors.type, descriptors.data[kept])
    scale = np.array([photograph.width / width, photograph.height / height])
    keypoints = keypoints * np.array([*scale, scale.mean(), 1.0])
    return keypoints.astype(np.float32), descriptors


def _in_order(work: Callable[[int], Any], items: Iterable[int], n_workers: int) -> Iterator[Any]:
    running: deque[Future] = deque()
    remaining = iter(items)
    with ThreadPoolExecutor(max_workers=n_workers) as pool:
        try:
            for item in itertools.islice(remaining, 2 * n_workers):
                running.append(pool.submit(work, item))
            while running:
                yield running.popleft().result()
                running.extend(pool.submit(work, item) for item in itertools.islice(remaining, 1))
        finally:
            for future in running:
                future.cancel()


def chosen_matcher(matcher: Matcher, n_photographs: int, in_order: bool) -> Matcher:
    if matcher != "auto":
        return matcher
    if n_photographs <= MAX_EXHAUSTIVE:
        return "exhaustive"
    return "sequential" if in_order else "similar"


def pairs_to_match(path: Path, n: int, matcher: Matcher) -> list[tuple[int, int]]:
    """Pairs of photographs by their places in the order, ascending: neighbours and similar ones."""
    if matcher == "exhaustive":
        return list(itertools.combinations(range(n), 2))
    pycolmap = load_pycolmap()
    found = []
    with pycolmap.Database.open(str(path)) as database:
        for number in range(1, n + 1):
            scales = database.read_keypoints(number)[:, 2]
            largest = np.argsort(-scales, kind="stable")[:COMPARED_FEATURES]
            found.append(database.read_descriptors(number).data[largest])
    alike = similar_pairs(found, 10 if matcher == "sequential" else 30)
    return sorted(alike | neighbour_pairs(n, 10 if matcher == "sequential" else 3))


def match_pairs(
    path: Path, pairs: Sequence[tuple[int, int]], seed: int, advance: Callable[[int], None]
) -> None:
    """Match pairs of photographs and check their geometry; pairs done before are skipped."""
    pycolmap = load_pycolmap()
    verification = pycolmap.TwoViewGeometryOptions()
    verification.ransac.random_seed = seed
    matching = pycolmap.FeatureMatchingOptions()
    matching.use_gpu = False
    # With more than one, pycolmap finds a few other matches in one of some fifty runs.
    matching.num_threads = torch.get_num_threads()
    with pycolmap.Database.open(str(path)) as database:
        waiting = [p for p in pairs if not database.exists_two_view_geometry(p[0] + 1, p[1] + 1)]
    done = len(pairs) - len(waiting)
    advance(done)
    with tempfile.TemporaryDirectory() as folder:
        pairing = pycolmap.ImportedPairingOptions()
        pairing.match_list_path = str(Path(folder) / "pairs.txt")
        for first in range(0, len(waiting), _PART):
            part = waiting[first : first + _PART]
            text = "".join(f"{database_name(i)} {database_name(j)}\n" for i, j in part)
            Path(pairing.match_list_path).write_text(text, encoding="utf-8")
            device = pycolmap.Device.cpu
            pycolmap.match_image_pairs(str(path), matching, pairing, verification, device)
            done += len(part)
            advance(done)


def verified_matches(path: Path) -> dict[tuple[int, int], int]:
    """Matches that agree with one geometry, by pair of places in the order; others left out."""
    pycolmap = load_pycolmap()
    with pycolmap.Database.open(str(path)) as database:
        keys, counts = database.read_two_view_geometry_num_inliers()
    pairs = [sorted(pycolmap.pair_id_to_image_pair(key)) for key in keys]
    return {(i - 1, j - 1): n for (i, j), n in zip(pairs, counts, strict=True) if n > 0}


def neighbour_pairs(n: int, reach: int = 10) -> set[tuple[int, int]]:
    """Pairs near each other in order: the next ``reach``, then steps of 16, 32, 64, ..."""
    steps = {*range(1, reach + 1), *(1 << k for k in range(n.bit_length()))}
    return {(i, i + step) for step in steps for i in range(n - step)}


def similar_pairs(descriptors: Sequence[np.ndarray], n_each: int = 30) -> set[tuple[int, int]]:
    """Pairs of photographs that show the same, found by a few features of each.

    The features that cover most of a photograph survive a change of viewpoint best (Wu 2013,
    "Towards linear-time incremental structure from motion", section 3).

    Args:
        descriptors: Of each photograph, its largest features. (K, 128) uint8, K may differ
    """
    n = len(descriptors)
    scores = _common_features(descriptors)
    pairs = set()
    for i in range(n):
        # A stable order, so that equal scores give the same pairs everywhere.
        best = np.argsort(-scores[i], kind="stable")[:n_each]
        pairs |= {(min(i, int(j)), max(i, int(j))) for j in best if scores[i, j] > 0}
    return pairs


def _common_features(descriptors: Sequence[np.ndarray]) -> np.ndarray:
    """How many features each photograph has in common with each other one. (n, n) int64"""
    n = len(descriptors)
    width = max((len(d) for d in descriptors), default=0)
    table = np.zeros((n, width, 128), np.float32)
    for row, own in zip(table, descriptors, strict=True):
        values = own.astype(np.float32)
        row[: len(own)] = values / np.maximum(np.linalg.norm(values, axis=1, keepdims=True), 1e-6)
    scores = np.zeros((n, n), np.int64)
    for i in range(n):
        for first in range(i + 1, n, _BLOCK):
            block = table[first : first + _BLOCK]
            scores[i, first : first + len(block)] = _found(table[i], block)
    return scores + scores.T


def _found(own: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Features of one photograph that are found clearly in each of some others."""
    n_others, width = others.shape[:2]
    if width < 2:
        return np.zeros(n_others, np.int64)
    likeness = (own @ others.reshape(-1, 128).T).reshape(-1, n_others, width)
    best = np.partition(likeness, width - 2, axis=2)[..., -2:]
    # Of vectors of length 1, squared distance is 2 - 2 cos.
    second = 2 - 2 * best[..., 0]
    first = 2 - 2 * best[..., 1]
    clear = (first < MAX_RATIO**2 * second) & own.any(axis=1)[:, None]
    return clear.sum(axis=0)


MIN_MATCHES = 30
MIN_PAIRS = 2


def contradicting_pairs(
    model: Any, database_path: Path, names: Sequence[str], matches: Mapping[tuple[int, int], int]
) -> dict[str, tuple[int, int]]:
    """Images most of whose pairs contradict their poses."""
    pycolmap = load_pycolmap()
    by_name = {model.images[n].name: model.images[n] for n in model.reg_image_ids()}
    tally = np.zeros((len(names), 2), dtype=int)
    rays: dict[int, np.ndarray] = {}
    with pycolmap.Database.open(str(database_path)) as database:
        for (i, j), count in matches.items():
            if count < MIN_MATCHES or not {names[i], names[j]} <= by_name.keys():
                continue
            images = [by_name[names[k]] for k in (i, j)]
            for k, image in zip((i, j), images, strict=True):
                if k not in rays:
                    keypoints = database.read_keypoints(k + 1)[:, :2].astype(np.float64)
                    camera = model.cameras[image.camera_id]
                    rays[k] = np.asarray(camera.cam_from_img(keypoints))
            rows = database.read_two_view_geometry(i + 1, j + 1).inlier_matches
            if not len(rows) or (rows.max(axis=0) >= (len(rays[i]), len(rays[j]))).any():
                raise UserError(
                    f"{database_path}: damaged, the matches of {names[i]} and {names[j]} are of "
                    "other features; remove it"
                )
            camera = model.cameras[images[0].camera_id]
            scale = camera.mean_focal_length() / max(camera.width, camera.height)
            error = scale * _median_error(images, rays[i][rows[:, 0]], rays[j][rows[:, 1]])
            tally[[i, j]] += (error > MAX_ERROR, 1)
    # A wrong image adds one contradicting pair to each of its neighbours.
    return {
        name: (int(wrong), int(n))
        for name, (wrong, n) in zip(names, tally, strict=True)
        if n >= MIN_PAIRS and wrong > CONTRADICTING_SHARE * n
    }


def _median_error(images: Sequence[Any], first: np.ndarray, second: np.ndarray) -> float:
    """Median Sampson distance of matches from the epipolar geometry of two poses."""
    move = (images[1].cam_from_world() * images[0].cam_from_world().inverse()).matrix()
    rotation, (x, y, z) = move[:, :3], move[:, 3]
    essential = np.array([[0, -z, y], [z, 0, -x], [-y, x, 0]]) @ rotation
    a, b = (np.concatenate([p, np.ones((len(p), 1))], axis=1) for p in (first, second))
    lines_b = a @ essential.T
    lines_a = b @ essential
    scale = np.sqrt((lines_b[:, :2] ** 2).sum(axis=1) + (lines_a[:, :2] ** 2).sum(axis=1))
    return float(np.median(np.abs((b * lines_b).sum(axis=1)) / np.maximum(scale, 1e-12)))
