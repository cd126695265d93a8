# SPDX-License-Identifier: Apache-2.0
"""Learned features: ALIKED (Zhao 2023, BSD-3-Clause) and LightGlue (Lindenberger 2023, Apache-2.0).

Both are ONNX files as COLMAP's releases have them; ONNX Runtime computes them, because pycolmap's
packages are built without it. COLMAP keeps them in ``~/.cache/colmap``, with their SHA-256 before
their names. Names and shapes of inputs and outputs are those that COLMAP checks.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from sugar_capture.features import matching
from sugar_capture.features.feature_database import open_database
from sugar_capture.features.matching import Features, ImagePairs
from sugar_capture.features.photographs import Photograph, read_upright
from sugar_utils.errors import Advance, UserError
from sugar_utils.libraries import load_package, load_pycolmap

EXTRACTOR = "aliked-n16rot.onnx"
MATCHER = "aliked-lightglue.onnx"
CACHE = (".cache", "colmap")  # below the home folder
PACKAGE = "onnxruntime"
_MOST_KEYPOINTS = 2048  # of an image; LightGlue's time grows with the square
_LEAST_KEYPOINT_SCORE = 0.2  # counts where the number of keypoints is not limited
_LEAST_MATCH_SCORE = 0.1
_BLOCK = 32  # pixels that the sides of ALIKED's input are multiples of
_PIXEL_MIDDLE = 0.5  # networks count from the middle of the first pixel, COLMAP from its corner
_INPUTS = {
    EXTRACTOR: {"image", "max_keypoints", "min_score"},
    MATCHER: {"kpts0", "kpts1", "desc0", "desc1", "image_size0", "image_size1"},
}


class LearnedWeights(NamedTuple):
    """The two files of weights."""

    extractor: Path
    matcher: Path


class Network(Protocol):
    """A session of ONNX Runtime."""

    def run(self, names: Sequence[str], inputs: dict[str, np.ndarray]) -> list[np.ndarray]:
        """Return the named outputs."""
        ...


class Networks(NamedTuple):
    """The two networks, ready to compute."""

    extractor: Network
    matcher: Network


def find_weights(folder: Path | None, is_asked_for: bool) -> LearnedWeights | None:
    """Return the weights in a folder, or in COLMAP's cache; None where something is missing.

    Args:
        folder: Of ``--feature_weights``; None for the cache.
        is_asked_for: Whether what is missing is an error.

    Raises:
        UserError: Weights or ONNX Runtime are asked for, and missing.
    """
    where = folder if folder is not None else Path.home().joinpath(*CACHE)
    paths = {}
    for name in (EXTRACTOR, MATCHER):
        path = _file_of(where, name)
        if path is None and not is_asked_for:
            return None
        if path is None:
            raise UserError(
                f"{where}: has no {name}; save it there from the releases of COLMAP 3.13, name its "
                "folder with --feature_weights, or pass --features affine"
            )
        paths[name] = path
    if importlib.util.find_spec(PACKAGE) is None:
        if not is_asked_for:
            return None
        load_package("--features learned", PACKAGE, PACKAGE, instead="pass --features affine")
    return LearnedWeights(paths[EXTRACTOR], paths[MATCHER])


def _file_of(folder: Path, name: str) -> Path | None:
    """Return the file of this name, or of this name after a checksum, as in COLMAP's cache."""
    if (folder / name).is_file():
        return folder / name
    return next(iter(sorted(folder.glob(f"*-{name}"))), None)


@functools.cache
def load_networks(weights: LearnedWeights) -> Networks:
    """Load both networks.

    Raises:
        UserError: A file is damaged, or another network.
    """
    (runtime,) = load_package(
        "--features learned", PACKAGE, PACKAGE, instead="pass --features affine"
    )
    return Networks(
        _load_network(runtime, weights.extractor, EXTRACTOR),
        _load_network(runtime, weights.matcher, MATCHER),
    )


def _load_network(runtime: Any, path: Path, name: str) -> Network:
    options = runtime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    advice = "remove it, and save it anew from the releases of COLMAP 3.13"
    try:
        network = runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # ONNX Runtime has no common base of its exceptions
        cause = str(error).splitlines()[0]
        raise UserError(f"{path}: cannot be loaded ({cause}); {advice}") from error
    inputs = {item.name for item in network.get_inputs()}
    if inputs != _INPUTS[name]:
        names = ", ".join(sorted(inputs))
        raise UserError(f"{path}: is another network than {name}, with inputs {names}; {advice}")
    return network


class LearnedFeatures:
    """Extracts and matches the features of some photographs into a database."""

    def __init__(self, networks: Networks, photographs: Sequence[Photograph]) -> None:
        self._networks = networks
        self._photographs = photographs

    def extract(
        self,
        path: Path,
        longest_side: int,
        indices: Sequence[int],
        advance: Advance,
    ) -> None:
        """Write the features of images that have none in the database yet."""

        def extract(index: int) -> Features:
            return self._features_of(index, longest_side)

        # One network computes on all cores.
        matching.add_features(path, indices, extract, 1, advance)

    def _features_of(self, index: int, longest_side: int) -> Features:
        pycolmap = load_pycolmap()
        photograph = self._photographs[index]
        pixels = np.asarray(read_upright(photograph.path, longest_side).convert("RGB"))
        height, width = pixels.shape[:2]
        inputs = {
            "image": _padded(pixels),
            "max_keypoints": np.array(_MOST_KEYPOINTS, np.int64),
            "min_score": np.array(_LEAST_KEYPOINT_SCORE, np.float32),
        }
        names = ("keypoints", "descriptors", "scores")
        unit_places, descriptors, _ = self._networks.extractor.run(names, inputs)
        padded_height, padded_width = inputs["image"].shape[2:]
        last_pixel = np.array([padded_width - 1, padded_height - 1])
        places = (unit_places[0] + 1) / 2 * last_pixel + _PIXEL_MIDDLE
        is_inside = ((places >= 0) & (places < [width, height])).all(axis=1)
        scale = np.array([photograph.width / width, photograph.height / height])
        keypoints = np.zeros((int(is_inside.sum()), 4), np.float32)
        keypoints[:, :2] = places[is_inside] * scale
        keypoints[:, 2] = scale.mean()
        rows = np.ascontiguousarray(descriptors[0][is_inside], np.float32)
        kind = pycolmap.FeatureExtractorType.ALIKED_N16ROT
        return Features(index, keypoints, pycolmap.FeatureDescriptors(kind, rows.view(np.uint8)))

    def match(
        self,
        path: Path,
        pairs: ImagePairs,
        seed: int,
        advance: Advance,
    ) -> None:
        """Match and verify pairs of images that are not in the database yet."""
        remaining = []
        with open_database(path) as database:
            for first, second in pairs:
                if not database.exists_two_view_geometry(first + 1, second + 1):
                    remaining.append((first, second))
            for n_done, (first, second) in enumerate(remaining):
                advance(len(pairs) - len(remaining) + n_done)
                if not database.exists_matches(first + 1, second + 1):
                    matches = self._matches_of(database, first, second)
                    database.write_matches(first + 1, second + 1, matches)
        if remaining:
            matching.verify_pairs(path, remaining, seed)
        advance(len(pairs))

    def _matches_of(self, database: Any, first: int, second: int) -> np.ndarray:
        """Return the keypoints of two images that LightGlue matches. (M, 2) uint32"""
        inputs = {}
        for number, index in enumerate((first, second)):
            photograph = self._photographs[index]
            keypoints = database.read_keypoints(index + 1)[None, :, :2] - _PIXEL_MIDDLE
            descriptors = np.ascontiguousarray(database.read_descriptors(index + 1).data)
            inputs[f"kpts{number}"] = keypoints.astype(np.float32)
            inputs[f"desc{number}"] = descriptors.view(np.float32)[None]
            size = [[photograph.width, photograph.height]]
            inputs[f"image_size{number}"] = np.array(size, np.float32)
        if min(inputs["kpts0"].shape[1], inputs["kpts1"].shape[1]) == 0:
            return np.zeros((0, 2), np.uint32)
        partners, scores = self._networks.matcher.run(("matches0", "mscores0"), inputs)
        partners = partners.reshape(-1).astype(np.int64)
        is_match = (partners >= 0) & (scores.reshape(-1) >= _LEAST_MATCH_SCORE)
        rows = np.flatnonzero(is_match)
        return np.stack([rows, partners[rows]], axis=1).astype(np.uint32)


def _padded(pixels: np.ndarray) -> np.ndarray:
    """Return colours from 0 to 1, with repeated borders. (H, W, 3) uint8 -> (1, 3, H', W')"""
    height, width = pixels.shape[:2]
    margins = ((0, -height % _BLOCK), (0, -width % _BLOCK), (0, 0))
    colors = np.pad(pixels, margins, mode="edge").astype(np.float32) / 255
    return np.ascontiguousarray(colors.transpose(2, 0, 1)[None])
