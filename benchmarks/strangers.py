# SPDX-License-Identifier: Apache-2.0
"""Map the matches of photographs by strangers: ``python benchmarks/strangers.py [--seeds 3]``.

The database ``strangers/database.db.xz`` is looked for in the folder that ``SUGAR_SCENES`` names.
For each seed it prints the images of all models, the points and the reprojection error of the
largest, the time, and how its poses differ from those of the first seed after a similarity.
"""

from __future__ import annotations

import argparse
import lzma
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pycolmap

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import sugar_utils  # noqa: F401  before torch

# isort: split
from sugar_capture.features.feature_database import database_name
from sugar_capture.registration import mapping
from sugar_capture.registration.mapping import MappingOptions, Models
from sugar_utils.entrypoint import run_main
from sugar_utils.errors import UserError
from sugar_utils.flags import Parser

_TOLERANCE = 0.2  # of the median distance from the middle, for positions that agree


def unpacked(folder: Path) -> Path:
    """Unpack the database into a folder, with the names that ``convert.py`` gives images.

    Raises:
        UserError: ``SUGAR_SCENES`` names no folder with it.
    """
    packed = Path(os.environ.get("SUGAR_SCENES", ".")) / "strangers" / "database.db.xz"
    if not packed.is_file():
        raise UserError(f"{packed}: not found; name the folder of scenes by SUGAR_SCENES")
    target = folder / "database.db"
    with lzma.open(packed) as source, target.open("wb") as sink:
        shutil.copyfileobj(source, sink)
    with pycolmap.Database.open(str(target)) as database:
        for image in database.read_all_images():
            image.name = database_name(image.image_id - 1)
            database.update_image(image)
    return target


def mapped(database: Path, folder: Path, seed: int) -> Models:
    """Map the images as ``convert.py`` does."""
    with pycolmap.Database.open(str(database)) as opened:
        n = opened.num_images()
    names = [database_name(index) for index in range(n)]
    options = MappingOptions("incremental", seed)
    return mapping.map_photographs(database, names, folder, options, None, lambda n_done: None)


def difference(model: pycolmap.Reconstruction, reference: pycolmap.Reconstruction) -> str:
    """Return how far positions and directions of two models are apart."""
    numbers = sorted(set(model.reg_image_ids()) & set(reference.reg_image_ids()))
    centers = [
        np.array([m.images[k].projection_center() for k in numbers]) for m in (model, reference)
    ]
    extent = float(np.median(np.linalg.norm(centers[1] - np.median(centers[1], axis=0), axis=1)))
    options = pycolmap.RANSACOptions()
    options.random_seed = 0
    options.max_error = _TOLERANCE * extent
    found = pycolmap.estimate_sim3d_robust(centers[0], centers[1], options)
    if found is None:
        return "no similarity"
    similarity = found["tgt_from_src"]
    moved = np.array([similarity * center for center in centers[0]])
    distances = np.linalg.norm(moved - centers[1], axis=1) / extent
    angles = []
    for number in numbers:
        turn = model.images[number].cam_from_world().rotation.matrix()
        expected = reference.images[number].cam_from_world().rotation.matrix()
        rest = turn @ similarity.rotation.matrix().T @ expected.T
        angles.append(np.degrees(np.arccos(np.clip((np.trace(rest) - 1) / 2, -1, 1))))
    places = np.percentile(distances, [50, 90]) * 100
    turns = np.percentile(angles, [50, 90])
    return (
        f"{len(numbers)} in both, positions {places[0]:.1f} % of the extent "
        f"(90 %: {places[1]:.1f}), "
        f"directions {turns[0]:.2f} degrees (90 %: {turns[1]:.2f})"
    )


def run(args: argparse.Namespace) -> None:
    """Map with each seed and print a line about it."""
    reference = None
    for seed in range(args.first, args.first + args.seeds):
        with tempfile.TemporaryDirectory() as folder:
            database = unpacked(Path(folder))
            start = time.perf_counter()
            start_cpu = time.process_time()
            models = mapped(database, Path(folder) / "sparse", seed)
            seconds = time.perf_counter() - start
            cpu_seconds = time.process_time() - start_cpu
        sizes = [len(names) for names in models.registered]
        line = f"seed {seed}: {sizes}, {seconds:.0f} s, {cpu_seconds:.0f} s of CPU"
        model = models.largest
        if model is not None:
            error = model.compute_mean_reprojection_error()
            line = f"{line}, {model.num_points3D()} points, {error:.2f} px"
            if reference is not None:
                line = f"{line}; from the first: {difference(model, reference)}"
            reference = reference or model
        print(line, flush=True)


if __name__ == "__main__":
    flags = Parser(description="Map the matches of photographs by strangers with several seeds.")
    flags.add_argument("--seeds", type=int, default=3, help="number of seeds")
    flags.add_argument("--first", type=int, default=0, help="the first of them")
    sys.exit(run_main(lambda: run(flags.parse_args())))
