# SPDX-License-Identifier: Apache-2.0
"""Measuring images, matches and models for the registration report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from gaussian_splatting.data.image_checks import sharpness
from sugar_capture import panoramas
from sugar_capture.features import matching
from sugar_capture.features.feature_database import database_errors, open_database
from sugar_capture.features.photographs import read_grey
from sugar_capture.pairs.pair_checks import contradicting_pairs
from sugar_capture.registration.capture import Capture, Registration
from sugar_capture.registration.mapping import Models
from sugar_capture.registration.registration_report import Evidence, model_facts

_SHARPNESS_SIDE = 800  # pixels of the longest side, at which sharpness is measured


def collect_evidence(
    capture: Capture, models: Models, registration: Registration | None
) -> Evidence:
    """Measure the images, their features and matches.

    Args:
        registration: That of the models; None for models of another program, of which there are
            no features and matches.
    """
    evidence = Evidence(
        names=capture.names,
        sharpness=_measure_sharpness(capture),
        n_features=[0] * capture.n,
        matches={},
        models=models.registered,
    )
    if registration is not None:
        # Unless masked features were asked for, whole images were tried as well.
        is_masked = registration.in_masks and capture.sfm.masked_features is True
        evidence = replace(
            evidence,
            registered_by=registration.registered_by,
            omitted_steps=registration.omitted,
            masked=is_masked,
        )
        evidence = _add_matches(evidence, models, registration.database)
    if models.largest is None:
        return evidence
    return _add_model(evidence, capture, models)


def _measure_sharpness(capture: Capture) -> list[float]:
    values = []
    with capture.step("checking photographs", capture.n) as advance:
        for n_done, photograph in enumerate(capture.photographs, start=1):
            values.append(sharpness(read_grey(photograph.path, _SHARPNESS_SIDE)))
            advance(n_done)
    return values


def _add_matches(evidence: Evidence, models: Models, path: Path) -> Evidence:
    """Add features and matches from a database."""
    contradicting = {}
    with database_errors(path):
        with open_database(path) as database:
            n_features = [
                database.num_keypoints_for_image(number)
                for number in range(1, len(evidence.names) + 1)
            ]
        matches = matching.verified_matches(path)
        if models.largest is not None:
            contradicting = contradicting_pairs(models.largest, path, evidence.names, matches)
    return replace(evidence, n_features=n_features, matches=matches, contradicting=contradicting)


def _add_model(evidence: Evidence, capture: Capture, models: Models) -> Evidence:
    """Add measurements of the largest model."""
    model = models.largest
    if model is None:
        raise ValueError("there is no model to measure")
    facts = model_facts(model)
    shared = facts.shared
    if capture.of_panoramas:
        shared = _shared_of_panoramas(shared, evidence.names)
    largest_pixel = max(capture.pixel_sizes(capture.sfm.extraction_size).values())
    return replace(
        evidence,
        n_points=model.num_points3D(),
        track_length=model.compute_mean_track_length(),
        error=model.compute_mean_reprojection_error() / largest_pixel,
        shared=shared,
        spread=facts.spread,
    )


def _shared_of_panoramas(shared: dict[str, int], names: Sequence[str]) -> dict[str, int]:
    """Give all views of a panorama the largest number; one view determines the pose of all."""
    of_panoramas = dict(shared)
    for group in panoramas.grouped(names):
        largest = max(shared.get(name, 0) for name in group)
        for name in group:
            if name in shared:
                of_panoramas[name] = largest
    return of_panoramas
