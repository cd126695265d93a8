# SPDX-License-Identifier: Apache-2.0
"""Verification of images that a further step registered, by their matches."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

from sugar_capture import matching
from sugar_capture.mapping import Models
from sugar_capture.pairs import pair_checks


def unproven_images(
    models: Models, added: Collection[str], database: Path, names: Sequence[str]
) -> set[str]:
    """Return the added images that contradict their matches, or match no registered image well.

    Args:
        added: Names of the images that were added to the largest model.
        names: Of all images, in the order of their numbers in the database.
    """
    model = models.largest
    if model is None or not added:
        return set()
    matches = matching.verified_matches(database)
    registered = models.registered[0]
    return pair_checks.unproven_images(model, added, registered, database, names, matches)
