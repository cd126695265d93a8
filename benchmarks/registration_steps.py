# SPDX-License-Identifier: Apache-2.0
"""Compare kinds of features: ``python benchmarks/registration_steps.py CAPTURE...``.

Captures are those of ``hard_registration.py``. Each kind is tried alone, on all photographs and all
pairs; with ``--ladder`` ``convert.py`` is run, once for each place at which the ladder may stop.
"""

from __future__ import annotations

import argparse
import itertools
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pycolmap

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import sugar_utils  # noqa: F401  before torch

# isort: split
from benchmarks.hard_registration import FOCAL, TRUTH, WIDTH
from gaussian_splatting.data.cameras import Camera
from sugar_capture.features import feature_kinds, matching
from sugar_capture.features.feature_database import create_database
from sugar_capture.features.feature_kinds import AFFINE, CONTRAST
from sugar_capture.features.matching import PLAIN_SIFT, SiftVariant
from sugar_capture.features.photographs import described_photographs
from sugar_capture.registration import mapping
from sugar_capture.registration.mapping import MappingOptions, Models
from sugar_utils.entrypoint import run_main
from sugar_utils.files import read_json
from sugar_utils.flags import Parser
from tests.support.pose_errors import pose_errors

ROOT = Path(__file__).resolve().parent.parent
SIZE = 1600  # pixels at which features are extracted
MAX_FEATURES = 8192


@dataclass(frozen=True)
class PooledSift(SiftVariant):
    """Descriptors pooled over several sizes of a region (Dong and Soatto, CVPR 2015)."""

    def options(self, longest_side: int, max_features: int) -> pycolmap.FeatureExtractionOptions:
        """Return pycolmap's options for an image of at most this size."""
        options = super().options(longest_side, max_features)
        options.sift.domain_size_pooling = True
        return options


KINDS = {
    "sift": PLAIN_SIFT,
    "affine shapes": SiftVariant(affine=True),
    "affine shapes, pooled": PooledSift(affine=True),
    "faint": SiftVariant(peak_threshold=0.002, features_factor=2),
    "affine": AFFINE.variant,
    "contrast": CONTRAST.variant,
}


def known_cameras(capture: Path) -> dict[str, Camera]:
    """Return the true cameras of a capture, by name; only their poses count."""
    cameras = {}
    for name, (rotation, translation) in read_json(capture / TRUTH).items():
        cameras[name] = Camera(
            name, WIDTH, WIDTH, FOCAL, FOCAL, 0.0, 0.0, np.array(rotation), np.array(translation)
        )
    return cameras


def describe(models: Models, known: dict[str, Camera]) -> str:
    """Return how many photographs are registered, and the errors of their poses."""
    line = f"{models.n_registered:3d} of {len(known)}"
    model = models.largest
    if model is None or models.n_registered < mapping.SMALLEST_MODEL:
        return line
    found = {}
    for number in model.reg_image_ids():
        image = model.images[number]
        name = Path(image.name).name
        if name not in known:
            line += f"; {name} IS FOREIGN"
            continue
        pose = image.cam_from_world()
        true = known[name]
        found[name] = Camera(
            name, WIDTH, WIDTH, true.fx, true.fy, 0.0, 0.0, pose.rotation.matrix(), pose.translation
        )
    errors = pose_errors(found, known)
    return (
        f"{line}; rotation {np.median(errors.rotation):.3f} at most {errors.rotation.max():.3f} "
        f"degrees; position {np.median(errors.position):.3f} at most {errors.position.max():.3f} %"
    )


def try_alone(capture: Path, variant: SiftVariant) -> str:
    """Register a capture by one kind of features alone."""
    start = time.process_time()
    photographs = described_photographs(capture / "input", True)
    names = [photograph.name for photograph in photographs]
    with tempfile.TemporaryDirectory() as folder:
        database = Path(folder) / "database.db"
        create_database(database, photographs, None)
        matching.extract_features(
            database, photographs, SIZE, MAX_FEATURES, lambda done: None, None, variant
        )
        extracted = time.process_time()
        pairs = list(itertools.combinations(range(len(names)), 2))
        matching.match_pairs(database, pairs, 0, lambda done: None)
        matched = time.process_time()
        options = MappingOptions("incremental", 0)
        models = mapping.map_photographs(
            database, names, Path(folder) / "sparse", options, None, lambda done: None
        )
    end = time.process_time()
    seconds = f"{extracted - start:.0f} + {matched - extracted:.0f} + {end - matched:.0f} s"
    return f"{describe(models, known_cameras(capture))}; {seconds}"


def climb_to(capture: Path, step: str) -> str:
    """Run ``convert.py`` on a copy of a capture, up to a step of the ladder."""
    with tempfile.TemporaryDirectory() as folder:
        scene = Path(folder) / "scene"
        shutil.copytree(capture / "input", scene / "input")
        command = [sys.executable, str(ROOT / "gaussian_splatting" / "convert.py")]
        words = [*command, "-s", str(scene), "--features", step]
        before = os.times()
        done = subprocess.run(words, capture_output=True, text=True)
        after = os.times()
        seconds = after.children_user - before.children_user
        seconds += after.children_system - before.children_system
        if done.returncode:
            lines = (done.stderr or done.stdout).strip().splitlines()
            return f"{lines[-1] if lines else done.returncode}; {seconds:.0f} s"
        models = mapping.read_models(scene / "distorted" / "sparse")
        return f"{describe(models, known_cameras(capture))}; {seconds:.0f} s"


def run(args: argparse.Namespace) -> None:
    for capture in args.captures:
        print(capture.name, flush=True)
        for name, variant in KINDS.items():
            if name in args.kinds:
                print(f"  {name:22s} {try_alone(capture, variant)}", flush=True)
        for step in feature_kinds.KINDS if args.ladder else ():
            if step != "learned":
                print(f"  up to {step:16s} {climb_to(capture, step)}", flush=True)


if __name__ == "__main__":
    flags = Parser(description="Measure what each kind of features registers.")
    flags.add_argument("captures", type=Path, nargs="+", metavar="CAPTURE")
    flags.add_argument("--kinds", nargs="*", choices=list(KINDS), default=list(KINDS))
    flags.add_argument("--ladder", action="store_true", help="run convert.py as well")
    sys.exit(run_main(lambda: run(flags.parse_args())))
