# SPDX-License-Identifier: Apache-2.0
"""From a finished training to its scores: truth and cameras for the protocol of a benchmark."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from benchmarks.mesh_quality import read_in_scene
from benchmarks.public import dtu, tanks
from benchmarks.public.jobs import Job, Trained
from benchmarks.public.layouts import Capture, read_dtu_cameras, read_masks, scene_folder
from benchmarks.public.views import score_views
from gaussian_splatting.data.cameras import Camera, centers_of
from gaussian_splatting.scenes.scene import VanillaSize, load_scene
from sugar_maps.similarity import fitted
from sugar_trainers.capture import SugarSize
from sugar_utils.errors import UserError, say_nothing

MAX_RESIDUAL = 0.01  # largest error of the cameras' fit to those of DTU, in their spread
N_SYNTHETIC_TESTS = 200  # views of the test split of NeRF-synthetic


class Scored(NamedTuple):
    """Figures of a scene, and what a reader of them must know."""

    scores: dict[str, float]
    notes: list[str]


Score = Callable[[Capture, Trained], Scored]


def scoring_of(job: Job) -> Score:
    """Return the scoring of a job; its truth is read now, before hours of training.

    Raises:
        UserError: Files of the truth are missing.
    """
    truth_root = Path(job.truth or job.data)
    if job.benchmark == "dtu":
        return partial(_score_dtu, dtu.read_truth(truth_root, int(job.scene.removeprefix("scan"))))
    if job.benchmark == "tanks":
        folder = scene_folder(truth_root, job.scene)
        return partial(_score_tanks, tanks.read_truth(folder, job.scene))
    return partial(_score_views, job.benchmark == "synthetic")


def _surface_cameras(capture: Capture) -> list[Camera]:
    """Read the cameras that a capture is trained on, in the world of its mesh."""
    scene = load_scene(
        capture.folder,
        images_dir=capture.images,
        size_rule=SugarSize(),
        eval_split=False,
        notify=say_nothing,
    )
    return scene.train_cameras


def _score_dtu(truth: dtu.DtuTruth, capture: Capture, trained: Trained) -> Scored:
    cameras = _surface_cameras(capture)
    rows = capture.rows_of(cameras)
    centers = centers_of(cameras)
    targets = read_dtu_cameras(capture.root).centers[rows]
    fit = fitted(centers, targets)
    if fit.distances.max() > MAX_RESIDUAL * targets.std(axis=0).max():
        raise UserError(
            f"{capture.root}: cameras.npz and the COLMAP model do not belong together, cameras "
            f"differ by {fit.distances.max():.3g} mm; download the scene again"
        )
    masks = read_masks(capture.root)
    mesh = read_in_scene(Path(trained.path))
    notes = []
    if masks:
        mesh = dtu.inside_masks(mesh, cameras, [masks[row] for row in rows])
    else:
        notes.append("no masks of the object in mask/: the whole mesh counts")
    mesh = replace(mesh, vertices=fit.similarity.moved(mesh.vertices), normals=None)
    return Scored(dtu.score_mesh(mesh, truth), notes)


def _score_tanks(truth: tanks.TanksTruth, capture: Capture, trained: Trained) -> Scored:
    cameras = _surface_cameras(capture)
    n_images = len(capture.image_files())
    if n_images != len(truth.centers):
        raise UserError(
            f"{capture.root}: {n_images} images, but the trajectory has {len(truth.centers)}; use "
            "all images of the training set"
        )
    centers = centers_of(cameras)
    mesh = read_in_scene(Path(trained.path))
    scores = tanks.score_mesh(mesh, centers, capture.rows_of(cameras), truth)
    return Scored(scores, [])


def _score_views(is_synthetic: bool, capture: Capture, trained: Trained) -> Scored:
    scene = load_scene(
        capture.folder,
        images_dir=capture.images,
        size_rule=VanillaSize(trained.resolution),
        white_background=is_synthetic,
        notify=say_nothing,
    )
    notes = []
    n_tests = len(scene.test_cameras)
    if is_synthetic and n_tests != N_SYNTHETIC_TESTS:
        notes.append(
            f"{n_tests} held-out views of {len(scene.train_cameras) + n_tests}, not the test split"
        )
    return Scored(score_views(scene, Path(trained.path), notes.append), notes)
