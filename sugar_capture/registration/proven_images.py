# SPDX-License-Identifier: Apache-2.0
"""Whether matches prove the poses of images that a step added to a model."""

from __future__ import annotations

import shutil
from pathlib import Path

from sugar_capture.features import matching
from sugar_capture.pairs import pair_checks
from sugar_capture.registration import mapping
from sugar_capture.registration.capture import Capture
from sugar_capture.registration.mapping import Models


def remove_unproven(
    capture: Capture, models: Models, earlier: Models, database: Path, folder: Path
) -> None:
    """Remove added images whose matches do not prove their poses; the folder if none are left.

    Args:
        models: After a step.
        earlier: Before the step.
        database: Of the matches.
        folder: Of the models after the step.
    """
    model = models.largest
    added = set(models.names).difference(earlier.names)
    if model is not None and added:
        unproven = pair_checks.unproven_images(
            model,
            added,
            models.names,
            database,
            capture.names,
            matching.verified_matches(database),
        )
        if unproven:
            models = mapping.without_images(unproven, folder)
    if models.n_registered <= earlier.n_registered:
        shutil.rmtree(folder)
