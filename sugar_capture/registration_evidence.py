# SPDX-License-Identifier: Apache-2.0
"""Measuring images, matches and models for the registration report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gaussian_splatting.data.image_checks import sharpness
from sugar_capture import matching, panoramas
from sugar_capture.feature_database import database_errors
from sugar_capture.ladder.climbing import Climbed
from sugar_capture.mapping import Models
from sugar_capture.pairs.pair_checks import contradicting_pairs
from sugar_capture.photographs import Photograph, read_grey
from sugar_capture.registration_attempts import Attempt
from sugar_capture.registration_report import Evidence, model_facts
from sugar_capture.scene_folder import Work
from sugar_utils.libraries import load_pycolmap

_SHARPNESS_SIDE = 800  # pixels of the longest side, at which sharpness is measured


def collect_evidence(
    work: Work, photographs: Sequence[Photograph], models: Models, climbed: Climbed | None
) -> Evidence:
    """Measure the images, their features and matches.

    Args:
        climbed: How the models were found; None for models of another program, of which there are
            no features and matches.
    """
    names = [photograph.name for photograph in photographs]
    evidence = Evidence(
        names=names,
        sharpness=_measure_sharpness(work, photographs),
        n_features=[0] * len(names),
        matches={},
        models=models.registered,
    )
    attempt = None
    if climbed is not None:
        attempt = climbed.attempt
        evidence = replace(
            evidence, registered_by=climbed.registered_by, omitted_steps=climbed.notes
        )
        # Unless masked features were asked for, whole images were tried as well.
        is_masked = attempt.masks is not None and work.options.sfm.masked_features is True
        evidence = replace(evidence, masked=is_masked)
        evidence = _add_matches(evidence, models, attempt)
    if models.largest is None:
        return evidence
    return _add_model(evidence, work, photographs, models, attempt)


def _measure_sharpness(work: Work, photographs: Sequence[Photograph]) -> list[float]:
    values = []
    with work.step("checking photographs", len(photographs)) as advance:
        for n_done, photograph in enumerate(photographs, start=1):
            values.append(sharpness(read_grey(photograph.path, _SHARPNESS_SIDE)))
            advance(n_done)
    return values


def _add_matches(evidence: Evidence, models: Models, attempt: Attempt) -> Evidence:
    """Add features and matches from the database of an attempt."""
    path = attempt.database
    contradicting = {}
    with database_errors(path):
        with load_pycolmap().Database.open(str(path)) as database:
            n_features = [
                database.num_keypoints_for_image(number)
                for number in range(1, len(evidence.names) + 1)
            ]
        matches = matching.verified_matches(path)
        if models.largest is not None:
            contradicting = contradicting_pairs(models.largest, path, evidence.names, matches)
    return replace(evidence, n_features=n_features, matches=matches, contradicting=contradicting)


def _add_model(
    evidence: Evidence,
    work: Work,
    photographs: Sequence[Photograph],
    models: Models,
    attempt: Attempt | None,
) -> Evidence:
    """Add measurements of the largest model."""
    model = models.largest
    if model is None:
        raise ValueError("there is no model to measure")
    facts = model_facts(model)
    shared = facts.shared
    if attempt is not None and attempt.of_panoramas:
        shared = _shared_of_panoramas(shared, evidence.names)
    longest_side = max(max(photograph.width, photograph.height) for photograph in photographs)
    scale = min(1.0, work.options.sfm.extraction_size / longest_side)
    return replace(
        evidence,
        n_points=model.num_points3D(),
        track_length=model.compute_mean_track_length(),
        error=model.compute_mean_reprojection_error() * scale,
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
