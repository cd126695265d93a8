# SPDX-License-Identifier: Apache-2.0
"""From matches to models: where every photograph was taken, as far as they hang together."""

from __future__ import annotations

import itertools
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from gaussian_splatting.data.colmap import read_reconstruction, write_model
from sugar_utils.files import replaced_folder
from sugar_utils.libraries import load_pycolmap

Mapper = Literal["auto", "incremental", "global"]
MAX_INCREMENTAL = 500  # most photographs to add one by one: time grows with the square
SMALLEST_MODEL = 3
WELL_KNOWN = 20  # photographs of one camera from which the middle of its lens is found, too


@dataclass(frozen=True)
class Models:
    # Pycolmap's reconstruction with most photographs; None if there is no model.
    largest: Any | None
    registered: list[list[str]]

    @property
    def n_placed(self) -> int:
        return len(self.registered[0]) if self.registered else 0


def chosen_mapper(mapper: Mapper, n_photographs: int) -> Mapper:
    if mapper != "auto":
        return mapper
    return "incremental" if n_photographs <= MAX_INCREMENTAL else "global"


def map_photographs(
    database: Path,
    names: Sequence[str],
    folder: Path,
    mapper: Mapper,
    seed: int,
    poses: Sequence[tuple[np.ndarray, np.ndarray]] | None,
    advance: Callable[[int], None],
    exact: bool = False,
    keeps_focal: bool = False,
) -> Models:
    """Find the models, the largest first as ``0``; on one core, because only then bits repeat.

    Known ``poses``, world-to-camera rotations and centres, are kept; so are lenses and rigs that
    are ``exact``. ``keeps_focal``: focal lengths, too, but not by the global mapper.
    """
    with replaced_folder(folder) as fresh:
        scratch = fresh / "scratch"
        scratch.mkdir(parents=True)
        if poses is not None:
            found = [_triangulated(database, scratch, poses, seed)]
        elif mapper == "incremental":
            found = _incremental(database, scratch, seed, advance, exact, keeps_focal)
        else:
            found = _global(database, scratch, seed, exact)
        found.sort(key=lambda model: (-model.num_reg_images(), -model.num_points3D()))
        if found and poses is None and not (exact or keeps_focal):
            refine_principal_points(found[0])
        shutil.rmtree(scratch)
        for number, model in enumerate(found):
            for image in model.images.values():
                image.name = names[image.image_id - 1]
            write_model(model, fresh / str(number))
    return _models(found)


def read_models(folder: Path) -> Models:
    folders = sorted(folder.glob("[0-9]*"), key=lambda path: (len(path.name), path.name))
    return _models([read_reconstruction(path) for path in folders])


def _models(found: Sequence[Any]) -> Models:
    registered = [sorted(model.images[n].name for n in model.reg_image_ids()) for model in found]
    return Models(found[0] if found else None, registered)


def refine_principal_points(model: Any) -> None:
    """Adjust a finished model once more, with the middle of the lens free where it can be known.

    While a model grows the middle cannot be told from a turned camera, so the mappers assume it.
    Many photographs from all around can tell; cameras that took few keep theirs.
    """
    pycolmap = load_pycolmap()
    images = [model.images[number] for number in model.reg_image_ids()]
    counts = Counter(image.camera_id for image in images)
    if max(counts.values()) < WELL_KNOWN:
        return
    config = pycolmap.BundleAdjustmentConfig()
    for image in images:
        config.add_image(image.image_id)
    for camera_id, count in counts.items():
        if count < WELL_KNOWN:
            config.set_constant_cam_intrinsics(camera_id)
    config.fix_gauge(pycolmap.BundleAdjustmentGauge.TWO_CAMS_FROM_WORLD)
    options = pycolmap.BundleAdjustmentOptions()
    options.refine_principal_point = True
    options.ceres.use_gpu = False
    options.ceres.solver_options.num_threads = 1
    pycolmap.create_default_bundle_adjuster(options, config, model).solve()
    model.update_point_3d_errors()


def _triangulated(
    database: Path, folder: Path, poses: Sequence[tuple[np.ndarray, np.ndarray]], seed: int
) -> Any:
    """The model of a database whose lenses and poses are known: points alone are found."""
    pycolmap = load_pycolmap()
    model = pycolmap.Reconstruction()
    options = pycolmap.IncrementalPipelineOptions()
    options.random_seed = seed
    options.num_threads = 1
    options.extract_colors = False
    with pycolmap.Database.open(str(database)) as opened:
        for camera in opened.read_all_cameras():
            model.add_camera(camera)
        for rig in opened.read_all_rigs():
            model.add_rig(rig)
        for frame in opened.read_all_frames():
            frame.rig_from_world = pycolmap.Rigid3d()
            model.add_frame(frame)
        for image in opened.read_all_images():
            model.add_image(image)
            rotation, center = poses[image.image_id - 1]
            pose = pycolmap.Rigid3d(pycolmap.Rotation3d(rotation), -rotation @ center)
            model.images[image.image_id].frame.set_cam_from_world(image.camera_id, pose)
    for number in list(model.frames):
        model.register_frame(number)
    where = str(database), str(folder), str(folder)
    return pycolmap.triangulate_points(model, *where, options=options)


def _global(database: Path, folder: Path, seed: int, exact: bool) -> list[Any]:
    pycolmap = load_pycolmap()
    options = pycolmap.GlobalPipelineOptions()
    options.random_seed = seed
    options.num_threads = 1
    options.min_model_size = SMALLEST_MODEL
    steps = options.mapper
    adjustment = options.mapper.bundle_adjustment
    adjustment.refine_focal_length = adjustment.refine_extra_params = not exact
    for step in (steps, steps.rotation_averaging, steps.global_positioning, adjustment):
        step.refine_sensor_from_rig = not exact
    where = str(database), str(folder), str(folder)
    return list(pycolmap.global_mapping(*where, options).values())


def _incremental(
    database: Path,
    folder: Path,
    seed: int,
    advance: Callable[[int], None],
    exact: bool,
    keeps_focal: bool,
) -> list[Any]:
    pycolmap = load_pycolmap()
    options = pycolmap.IncrementalPipelineOptions()
    options.random_seed = seed
    options.num_threads = 1
    options.ba_refine_focal_length = not (exact or keeps_focal)
    options.ba_refine_extra_params = not exact
    options.ba_refine_sensor_from_rig = not exact
    options.min_model_size = SMALLEST_MODEL
    # Colours come from the undistorted photographs, which are read anyway.
    options.extract_colors = False
    placed = itertools.count(1)
    found = pycolmap.incremental_mapping(
        str(database),
        str(folder),
        str(folder),
        options,
        initial_image_pair_callback=lambda: (next(placed), advance(next(placed))),
        next_image_callback=lambda: advance(next(placed)),
    )
    return list(found.values())
