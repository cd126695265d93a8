# SPDX-License-Identifier: Apache-2.0
"""The last adjustment of a finished model: lenses whose pixels are square, and principal points.

Images of every kind of motion determine a focal length. A second one, decentring and the principal
point are determined by some motions only: where all images are taken level, a taller pixel and a
taller scene look the same, and so do a decentred lens and a tilted camera.
"""

from __future__ import annotations

import copy
from collections import Counter
from typing import TYPE_CHECKING

from sugar_utils.libraries import load_pycolmap

if TYPE_CHECKING:
    import pycolmap

MIN_IMAGES_FOR_PRINCIPAL_POINT = 20  # of one camera, from which its principal point is refined
MOST_WORSE = 1.5  # reprojection error of a changed model, in times of that before
_AS_EXACT = 1.01  # reprojection error with square pixels, in times of that with oblong ones
# Fall of the sum of squared errors, in times of their mean, by which principal points are believed.
# By chance alone it is about 2. A lens that is off by 9 of 539 pixels makes it 2,310 (fox).
_CLEAR_FALL = 100.0


def with_principal_points(model: pycolmap.Reconstruction) -> pycolmap.Reconstruction:
    """Return a finished model, adjusted once more with principal points where they are determined.

    While a model grows, a principal point cannot be told from a rotation of the camera, so the
    mappers assume it. Many images from all around determine it. Pixels are taken for square if that
    fits as well.

    The model stays as it was where the adjustment gets lost. It does where a lens was assumed for
    images of several ones, so that distortion makes up for it.
    """
    counts = Counter(model.images[number].camera_id for number in model.reg_image_ids())
    if max(counts.values()) < MIN_IMAGES_FOR_PRINCIPAL_POINT:
        return model
    error = model.compute_mean_reprojection_error()
    refined = copy.deepcopy(model)
    refine_lenses(refined, has_square_pixels=True, has_free_centers=True)
    if refined.compute_mean_reprojection_error() <= _AS_EXACT * error:
        centered = copy.deepcopy(model)
        refine_lenses(centered, has_square_pixels=True, has_free_centers=False)
        return refined if _is_better_by_far(refined, centered) else centered
    refined = copy.deepcopy(model)
    refine_lenses(refined, has_square_pixels=False, has_free_centers=True)
    is_sound = refined.compute_mean_reprojection_error() <= MOST_WORSE * error
    return refined if is_sound else model


def _is_better_by_far(refined: pycolmap.Reconstruction, other: pycolmap.Reconstruction) -> bool:
    """Whether squared errors fall by more than what chance and small faults of a lens explain."""
    share = refined.compute_mean_reprojection_error() / other.compute_mean_reprojection_error()
    return refined.compute_num_observations() * (1 - share**2) > _CLEAR_FALL


def refine_lenses(
    model: pycolmap.Reconstruction, has_square_pixels: bool, has_free_centers: bool
) -> None:
    """Adjust a model; cameras that took few images keep their lenses.

    Args:
        has_square_pixels: Lenses of the model OPENCV get one focal length and radial distortion
            alone.
        has_free_centers: Principal points are refined.
    """
    pycolmap = load_pycolmap()
    images = [model.images[number] for number in model.reg_image_ids()]
    config = pycolmap.BundleAdjustmentConfig()
    for image in images:
        config.add_image(image.image_id)
    square = []
    for camera_id, count in Counter(image.camera_id for image in images).items():
        lens = model.cameras[camera_id]
        if count < MIN_IMAGES_FOR_PRINCIPAL_POINT:
            config.set_constant_cam_intrinsics(camera_id)
        elif has_square_pixels and lens.model_name == "OPENCV":
            square.append(lens)
    for lens in square:
        fx, fy, cx, cy, k1, k2, _, _ = lens.params
        lens.model = pycolmap.CameraModelId.RADIAL
        lens.params = [(fx + fy) / 2, cx, cy, k1, k2]
    options = pycolmap.BundleAdjustmentOptions()
    options.refine_principal_point = has_free_centers
    solve(model, config, options)
    for lens in square:
        focal, cx, cy, k1, k2 = lens.params
        lens.model = pycolmap.CameraModelId.OPENCV
        lens.params = [focal, focal, cx, cy, k1, k2, 0.0, 0.0]


def solve(
    model: pycolmap.Reconstruction,
    config: pycolmap.BundleAdjustmentConfig,
    options: pycolmap.BundleAdjustmentOptions,
) -> None:
    """Adjust a model on one core."""
    pycolmap = load_pycolmap()
    config.fix_gauge(pycolmap.BundleAdjustmentGauge.TWO_CAMS_FROM_WORLD)
    options.ceres.use_gpu = False
    options.ceres.solver_options.num_threads = 1
    pycolmap.create_default_bundle_adjuster(options, config, model).solve()
    model.update_point_3d_errors()
