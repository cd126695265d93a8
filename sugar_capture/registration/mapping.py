# SPDX-License-Identifier: Apache-2.0
"""From matches to models: the pose of every image, for each set of images that share points."""

from __future__ import annotations

import copy
import shutil
import tempfile
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gaussian_splatting.data.colmap import read_reconstruction, write_model
from sugar_capture.convert_options import Mapper
from sugar_capture.features.feature_database import database_name, open_database, separate_lenses
from sugar_capture.features.matching import verified_matches
from sugar_capture.pairs.chosen_pairs import Pair
from sugar_capture.pairs.first_pairs import strong_pairs
from sugar_capture.pairs.model_joining import aligned_to
from sugar_capture.pairs.pair_checks import unproven_images
from sugar_capture.registration.final_adjustment import MOST_WORSE, solve, with_principal_points
from sugar_capture.registration.model_growth import SMALLEST_MODEL, ModelGrowth, size_of
from sugar_utils.errors import Advance
from sugar_utils.files import replaced_folder
from sugar_utils.libraries import load_pycolmap

if TYPE_CHECKING:
    import pycolmap

Poses = Sequence[tuple[np.ndarray, np.ndarray]]  # world to camera, (3, 3), and centre, (3,)
MAX_INCREMENTAL = 500  # most images to add one by one: time grows with the square
_LEAST_POINTS = 30  # of an image, or of all images of a rig at a time, that support its pose
_CLEARLY_BETTER = 0.9  # reprojection error with a lens for each image, in times of that with one


@dataclass(frozen=True)
class Models:
    """The models of a capture, one for each set of images that share points."""

    # Pycolmap's reconstruction with most images; None if there is no model.
    largest: pycolmap.Reconstruction | None
    registered: list[list[str]]  # names of the images of each model, largest model first

    @property
    def n_registered(self) -> int:
        """Number of images of the largest model."""
        return len(self.names)

    @property
    def names(self) -> list[str]:
        """Names of the images of the largest model."""
        return self.registered[0] if self.registered else []


@dataclass(frozen=True)
class MappingOptions:
    """Settings of the mapper."""

    mapper: Mapper  # not ``auto``, see :func:`chosen_mapper`
    seed: int
    keeps_lenses: bool = False  # lenses and rigs are exact and stay as they are
    keeps_focal: bool = False  # focal lengths stay, too, except for the global mapper


def chosen_mapper(mapper: Mapper, n_photographs: int) -> Mapper:
    """Resolve ``auto`` by the number of images."""
    if mapper != "auto":
        return mapper
    return "incremental" if n_photographs <= MAX_INCREMENTAL else "global"


def map_photographs(
    database: Path,
    names: Sequence[str],
    folder: Path,
    options: MappingOptions,
    poses: Poses | None,
    advance: Advance,
    start: pycolmap.Reconstruction | None = None,
) -> Models:
    """Find the models and write them into a folder, the largest first as ``0``.

    It runs on one core, because only then results are the same bits each time.

    Args:
        names: Of the images, in the order of their numbers in the database.
        poses: Of the images, where they are known; they are kept.
        advance: Called with the number of registered images.
        start: A model with some of the images, which the others are added to one by one.
    """
    with replaced_folder(folder) as fresh:
        scratch = fresh / "scratch"
        scratch.mkdir(parents=True)
        if poses is not None:
            by_number = dict(enumerate(poses, start=1))
            models = [_triangulate(database, scratch, by_number, options.seed, {})]
        elif start is not None or options.mapper == "incremental":
            models = _map_incrementally(database, scratch, options, advance, start)
        else:
            models = _map_globally(database, scratch, options)
        models.sort(key=size_of, reverse=True)
        is_known = poses is not None or options.keeps_lenses or options.keeps_focal
        if models and not is_known and not _keeps_poses(start):
            models[0] = with_principal_points(models[0])
        shutil.rmtree(scratch)
        for number, model in enumerate(models):
            for image in model.images.values():
                image.name = names[image.image_id - 1]
            write_model(model, fresh / str(number))
    return _models(models)


def _keeps_poses(start: pycolmap.Reconstruction | None) -> bool:
    """Whether a model that others are added to keeps its poses and lenses.

    To adjust so many again for the sake of a few takes as long as to find them.
    """
    return start is not None and start.num_reg_images() > MAX_INCREMENTAL


def read_models(folder: Path) -> Models:
    """Read what :func:`map_photographs` wrote into a folder."""
    return _models([read_reconstruction(path) for path in _model_folders(folder)])


def _model_folders(folder: Path) -> list[Path]:
    """Return the folders of the models, the largest first."""
    return sorted(folder.glob("[0-9]*"), key=lambda path: (len(path.name), path.name))


def without_images(names: Collection[str], folder: Path) -> Models:
    """Take images out of the largest model; write all models into their folder again."""
    remaining = [read_reconstruction(path) for path in _model_folders(folder)]
    largest = remaining[0]
    for number in sorted(largest.reg_image_ids()):
        image = largest.images[number]
        if image.name in names:
            largest.deregister_frame(image.frame_id)
    with replaced_folder(folder) as fresh:
        for number, model in enumerate(remaining):
            write_model(model, fresh / str(number))
    return read_models(folder)


def _models(models: Sequence[Any]) -> Models:
    registered = []
    for model in models:
        names = [model.images[number].name for number in model.reg_image_ids()]
        registered.append(sorted(names))
    return Models(models[0] if models else None, registered)


def _triangulate(
    database: Path,
    folder: Path,
    poses: Mapping[int, tuple[np.ndarray, np.ndarray]],
    seed: int,
    lenses: Mapping[int, Any],
) -> pycolmap.Reconstruction:
    """Triangulate the points of a database with known intrinsics and poses.

    Args:
        poses: By number of the image, see ``Poses``; images without one are not registered.
        lenses: Of each camera by its number; those that are missing are taken from the database.
    """
    pycolmap = load_pycolmap()
    model = pycolmap.Reconstruction()
    options = pycolmap.IncrementalPipelineOptions()
    options.random_seed = seed
    options.num_threads = 1
    options.extract_colors = False
    with open_database(database) as opened:
        for camera in opened.read_all_cameras():
            model.add_camera(lenses.get(camera.camera_id, camera))
        for rig in opened.read_all_rigs():
            model.add_rig(rig)
        for frame in opened.read_all_frames():
            if any(data.id in poses for data in frame.image_ids):
                frame.rig_from_world = pycolmap.Rigid3d()
            model.add_frame(frame)
        for image in opened.read_all_images():
            model.add_image(image)
            if image.image_id in poses:
                rotation, center = poses[image.image_id]
                pose = pycolmap.Rigid3d(pycolmap.Rotation3d(rotation), -rotation @ center)
                model.images[image.image_id].frame.set_cam_from_world(image.camera_id, pose)
    registered_frames = {model.images[number].frame_id for number in poses}
    for number in sorted(registered_frames):
        model.register_frame(number)
    return pycolmap.triangulate_points(
        model, str(database), str(folder), str(folder), options=options
    )


def _map_globally(database: Path, folder: Path, options: MappingOptions) -> list[Any]:
    pycolmap = load_pycolmap()
    pipeline = pycolmap.GlobalPipelineOptions()
    pipeline.random_seed = options.seed
    pipeline.num_threads = 1
    pipeline.min_model_size = SMALLEST_MODEL
    refines_lenses = not options.keeps_lenses
    mapper = pipeline.mapper
    adjustment = mapper.bundle_adjustment
    adjustment.refine_focal_length = refines_lenses
    adjustment.refine_extra_params = refines_lenses
    for step in (mapper, mapper.rotation_averaging, mapper.global_positioning, adjustment):
        step.refine_sensor_from_rig = refines_lenses
    models = pycolmap.global_mapping(str(database), str(folder), str(folder), pipeline)
    for model in models.values():
        _leave_out_unsupported(model)
    return [model for model in models.values() if model.num_reg_images() >= SMALLEST_MODEL]


def _leave_out_unsupported(model: pycolmap.Reconstruction) -> None:
    """Remove images with poses that few points support from a model.

    The global mapper gives a pose to every image with relative ones, and keeps it where no point is
    left. The incremental mapper asks for as many points before it registers an image.
    """
    n_points: Counter[int] = Counter()
    for number in model.reg_image_ids():
        image = model.images[number]
        n_points[image.frame_id] += image.num_points3D
    for frame, count in n_points.items():
        if count < _LEAST_POINTS:
            model.deregister_frame(frame)


def _map_incrementally(
    database: Path,
    folder: Path,
    options: MappingOptions,
    advance: Advance,
    start: pycolmap.Reconstruction | None,
) -> list[Any]:
    """Register images incrementally, or find models from several initial pairs."""
    with open_database(database) as opened:
        n = opened.num_images()
    growth = ModelGrowth(
        database if start is None else _database_of(start, database, folder),
        folder,
        n,
        options.seed,
        refines_lenses=not options.keeps_lenses,
        refines_focal=not (options.keeps_lenses or options.keeps_focal),
        advance=advance,
    )
    if start is not None:
        start_folder = folder / "start"
        write_model(_with_database_names(start), start_folder)
        extended = growth.continued(start_folder, start.num_reg_images(), _keeps_poses(start))
        return [max([start, *extended], key=lambda model: model.num_reg_images())]
    models = growth.first_model()
    if not models:
        return []
    matches = verified_matches(database)
    # To grow a model of thousands again takes longer than to do without a tenth of them.
    if n <= MAX_INCREMENTAL and not growth.is_whole(models[0], matches):
        models = [_joined(growth, [*models, *growth.further_models(models[0], matches)], matches)]
    others = sorted(set(range(1, n + 1)).difference(models[0].reg_image_ids()))
    if len(others) >= SMALLEST_MODEL:
        models += growth.models_of(others)
    return models


def _joined(growth: ModelGrowth, parts: Sequence[Any], matches: Mapping[Pair, int]) -> Any:
    """Return the largest model, extended by the other models and by single images."""
    largest, *others = sorted(parts, key=size_of, reverse=True)
    for other in others:
        largest = _with_part(growth, largest, other, matches)
    separate = _with_separate_lenses(growth, largest)
    if separate is not None:
        growth = replace(growth, database=_database_of(separate, growth.database, growth.folder))
        largest = separate
    if largest.num_reg_images() == growth.n:
        return largest
    start = growth.folder / "incomplete"
    write_model(largest, start)
    completed = growth.completed(start, largest.num_reg_images())
    return _proven(growth, completed, largest, matches)


def _with_part(growth: ModelGrowth, model: Any, part: Any, matches: Mapping[Pair, int]) -> Any:
    """Return a model with the images of another one; without them where the two do not agree."""
    if set(part.reg_image_ids()) <= set(model.reg_image_ids()):
        return model
    aligned = aligned_to(part, model, growth.database, strong_pairs(matches), growth.seed)
    if aligned is None:
        return model
    poses = _poses_of(aligned) | _poses_of(model)
    lenses = dict(model.cameras)
    used = {model.images[number].camera_id for number in model.reg_image_ids()}
    for number in aligned.reg_image_ids():
        camera_id = aligned.images[number].camera_id
        if camera_id not in used:
            lenses[camera_id] = aligned.cameras[camera_id]
    with tempfile.TemporaryDirectory(dir=growth.folder) as scratch:
        joined = _triangulate(growth.database, Path(scratch), poses, growth.seed, lenses)
        _adjust(joined)
        start = Path(scratch) / "joined"
        write_model(joined, start)
        further = growth.continued(start, joined.num_reg_images(), keeps_poses=False)
    return _proven(growth, further, model, matches)


def _with_separate_lenses(growth: ModelGrowth, model: Any) -> Any | None:
    """Return a model with intrinsics per image if it fits clearly better, else None.

    Images without EXIF are taken for those of one camera, as those of a video are. Strangers'
    images are not.
    """
    lenses = dict(model.cameras)
    counts = Counter(model.images[number].camera_id for number in model.reg_image_ids())
    shared = set()
    with open_database(growth.database) as opened:
        for camera_id, count in counts.items():
            if count > 1 and not opened.read_camera(camera_id).has_prior_focal_length:
                shared.add(camera_id)
    if not shared or not growth.refines_focal:
        return None
    with tempfile.TemporaryDirectory(dir=growth.folder) as scratch:
        database = Path(scratch) / "database.db"
        shutil.copyfile(growth.database, database)
        for new_id, camera_id in separate_lenses(database, shared).items():
            lens = copy.deepcopy(lenses[camera_id])
            lens.camera_id = new_id
            lenses[new_id] = lens
        poses = _poses_of(model)
        separate = _triangulate(database, Path(scratch), poses, growth.seed, lenses)
    _adjust(separate)
    error = separate.compute_mean_reprojection_error()
    is_better = error <= _CLEARLY_BETTER * model.compute_mean_reprojection_error()
    return separate if is_better else None


def _database_of(model: pycolmap.Reconstruction, database: Path, folder: Path) -> Path:
    """Return a database with the cameras of a model: a copy where its images have a lens each."""
    with open_database(database) as opened:
        camera_ids = {image.image_id: image.camera_id for image in opened.read_all_images()}
    shared = set()
    for number in model.reg_image_ids():
        if model.images[number].camera_id != camera_ids[number]:
            shared.add(camera_ids[number])
    if not shared:
        return database
    path = folder / "separate_lenses.db"
    shutil.copyfile(database, path)
    separate_lenses(path, shared)
    return path


def _proven(
    growth: ModelGrowth, extended: Sequence[Any], model: Any, matches: Mapping[Pair, int]
) -> Any:
    """Return a model with the images that were added to it, where verified matches prove them.

    Args:
        extended: The model with them; empty if there is none.
    """
    if not extended:
        return model
    candidate = extended[0]
    names = [database_name(index) for index in range(growth.n)]
    added = set(candidate.reg_image_ids()).difference(model.reg_image_ids())
    added_names = {names[number - 1] for number in added}
    registered = [names[number - 1] for number in candidate.reg_image_ids()]
    unproven = unproven_images(candidate, added_names, registered, growth.database, names, matches)
    if 2 * len(unproven) > len(added):
        return model
    for number in sorted(added):
        if names[number - 1] in unproven:
            candidate.deregister_frame(candidate.images[number].frame_id)
    error = model.compute_mean_reprojection_error()
    is_as_exact = candidate.compute_mean_reprojection_error() <= MOST_WORSE * error
    is_larger = candidate.num_reg_images() > model.num_reg_images()
    return candidate if is_larger and is_as_exact else model


def _adjust(model: pycolmap.Reconstruction) -> None:
    """Adjust poses, points and focal lengths of a model that was put together."""
    pycolmap = load_pycolmap()
    config = pycolmap.BundleAdjustmentConfig()
    for number in model.reg_image_ids():
        config.add_image(number)
    options = pycolmap.BundleAdjustmentOptions()
    options.refine_extra_params = False
    options.ceres.loss_function_type = pycolmap.LossFunctionType.SOFT_L1
    solve(model, config, options)


def _with_database_names(model: pycolmap.Reconstruction) -> pycolmap.Reconstruction:
    """Return a copy of a model whose images have the names of the database."""
    renamed = copy.deepcopy(model)
    for image in renamed.images.values():
        image.name = database_name(image.image_id - 1)
    return renamed


def with_points_of(
    database: Path, model: pycolmap.Reconstruction, seed: int
) -> pycolmap.Reconstruction:
    """Return the points of a database for the lenses and poses of a model of the same images.

    Args:
        database: Its images have other features than those that the model was made of.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        fitting = _database_of(model, database, folder)
        return _triangulate(fitting, folder, _poses_of(model), seed, dict(model.cameras))


def _poses_of(model: pycolmap.Reconstruction) -> dict[int, tuple[np.ndarray, np.ndarray]]:
    """Return the rotation and centre of each registered image by its number, see ``Poses``."""
    poses = {}
    for number in model.reg_image_ids():
        pose = model.images[number].cam_from_world()
        rotation = pose.rotation.matrix()
        poses[number] = (rotation, -rotation.T @ pose.translation)
    return poses
