# SPDX-License-Identifier: Apache-2.0
"""The steps by which the images of a capture are registered, in order."""

from __future__ import annotations

import shutil

from sugar_capture.features.feature_kinds import kinds_up_to, sift_at
from sugar_capture.registration.capture import Capture, Registration
from sugar_capture.registration.other_features import OtherFeatures
from sugar_capture.registration.plain_steps import plain_steps
from sugar_capture.registration.pose_time import LEVELS
from sugar_capture.registration.steps import RegistrationStep, register
from sugar_capture.registration.whole_images import WholeImages
from sugar_utils.errors import UserError
from sugar_utils.files import replaced_folder
from sugar_utils.libraries import load_pycolmap


def steps_of(capture: Capture, in_masks: bool, tries_whole: bool) -> list[RegistrationStep]:
    """Return the steps of a capture, in order.

    Args:
        in_masks: Features are those inside of masks.
        tries_whole: Whole images are tried where masks leave too little.
    """
    steps: list[RegistrationStep] = [*plain_steps("masked_" if in_masks else "")]
    if tries_whole:
        steps.append(WholeImages())
    sfm = capture.sfm
    level = (sfm.extraction_size, sfm.max_features)
    if capture.work.options.time_limit is not None and level in LEVELS[1:]:
        steps.append(OtherFeatures(sift_at(LEVELS[0], level)))
    for kind in kinds_up_to(sfm.features, sfm.feature_weights):
        steps.append(OtherFeatures(kind))
    return steps


def register_images(capture: Capture, in_masks: bool, tries_whole: bool) -> Registration:
    """Register the images of a capture; copy the models to where programs look for them.

    Args:
        in_masks: Features are those inside of masks.
        tries_whole: Whole images are tried where masks leave too little.

    Raises:
        UserError: Pycolmap does not have the mapper.
    """
    pycolmap = load_pycolmap()
    if capture.mapper == "global" and not hasattr(pycolmap, "global_mapping"):
        raise UserError(
            f"--mapper global: pycolmap {pycolmap.__version__} has none; use --mapper incremental"
        )
    steps = steps_of(capture, in_masks, tries_whole)
    registration = register(capture, steps, capture.start(in_masks))
    if registration.folder is not None:
        with replaced_folder(capture.work.models) as fresh:
            shutil.copytree(registration.folder, fresh)
    return registration
