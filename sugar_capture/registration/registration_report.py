# SPDX-License-Identifier: Apache-2.0
"""The registration report: how well the images were registered, and what the user can do."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from sugar_utils.errors import UserError, shortened

if TYPE_CHECKING:
    import pycolmap

FINE = "fine"
BLURRED = 0.35
"""Sharpness below which an image is called blurred. At 800 pixels the images that it was set by
have 0.56 to 0.68, after a Gaussian blur of one pixel 0.38 to 0.44, of two pixels 0.17 to 0.24."""

FEW_FEATURES = 200
MANY_FEATURES = 1_000  # an image with so many, none of which match, is of another place
FINE_SHARE = 0.95
USABLE_SHARE = 0.75
FINE_IMAGES = 20  # registered ones; fewer leave most of a surface to two or three of them
FINE_ERROR = 1.5  # mean reprojection error in pixels of the size at which features are extracted
LOOSE_POINTS = 60  # an image that shares fewer points with every other is weakly connected
SPLIT_SHARE = 0.2  # a second model with more of the images means two separate sets
SMALLEST_SPLIT = 3  # images of a second model that means two separate sets
NARROW = 0.05  # camera path extent / distance to the scene; below, depth is poorly determined
_MOST_GAPS = 3

_LESS_MASKED = (
    "the masks leave too little to go by; if the background stood still, pass --masked_features "
    "False, which uses them for all but the cameras"
)


@dataclass(frozen=True)
class Evidence:
    """Measurements of all images, in their order; the report is made from them alone."""

    names: Sequence[str]
    sharpness: Sequence[float]  # of each image, (N,)
    n_features: Sequence[int]  # of each image, (N,)
    matches: Mapping[tuple[int, int], int]  # verified matches of pairs, by places in the order
    models: Sequence[Sequence[str]]  # names of the registered images of each model, largest first
    # Of the largest model:
    n_points: int = 0
    track_length: float = 0.0  # mean
    error: float = 0.0  # mean reprojection error, in pixels at which features are extracted
    shared: Mapping[str, int] | None = None  # most points that an image shares with another one
    spread: float = 1.0  # camera path extent / distance to the scene
    masked: bool = False  # features were extracted inside of masks only
    given: bool = False  # cameras are those of another program
    # Pairs that contradict an image's pose, and all of its pairs, by name.
    contradicting: Mapping[str, tuple[int, int]] | None = None
    # Names of the images that only a further kind of features registered, by its label.
    registered_by: Mapping[str, Sequence[str]] = field(default_factory=dict)
    warnings: int = 0  # what the checks of the capture found to be likely to go wrong
    omitted_steps: Sequence[str] = ()  # sentences about kinds of features that were not tried


@dataclass(frozen=True)
class RegistrationReport:
    """The registration report of a capture."""

    word: str  # ``fine``, ``usable`` or ``poor``
    n_registered: int
    left_out: list[tuple[str, str]]  # name and reason
    other_models: list[list[str]]  # images of smaller models that the largest one lacks
    advice: list[str]

    def line(self, evidence: Evidence) -> str:
        """Summarise the report in one line."""
        n = len(evidence.names)
        parts = [f"{self.n_registered} of {n} photographs are registered"]
        for label, names in evidence.registered_by.items():
            parts.append(f"{len(names)} of them only by {label}")
        if self.left_out:
            reasons = [f"{name} ({reason})" for name, reason in self.left_out]
            parts.append(f"left out: {shortened(reasons, 5)}")
        parts.append(f"reprojection error {evidence.error:.2f} px")
        parts.append(f"{evidence.n_points:,} points")
        parts.append(f"quality: {self.word}")
        return "; ".join(parts)


def registration_of(evidence: Evidence) -> RegistrationReport:
    """Judge a registration.

    Raises:
        UserError: No image is registered, or the images fall into two separate sets.
    """
    if not evidence.models:
        raise UserError(_why_nothing(evidence))
    registered = set(evidence.models[0])
    others = [sorted(set(model) - registered) for model in evidence.models[1:]]
    _refuse_split(evidence, registered, others)
    left_out = []
    for index, name in enumerate(evidence.names):
        if name not in registered:
            left_out.append((name, _reason(evidence, index, registered)))
    return RegistrationReport(
        word=_quality(evidence, len(registered)),
        n_registered=len(registered),
        left_out=left_out,
        other_models=[names for names in others if names],
        advice=_advice(evidence, registered),
    )


def _refuse_split(
    evidence: Evidence, registered: Collection[str], others: Sequence[Sequence[str]]
) -> None:
    """Raise a ``UserError`` if a second model has a large share of the images."""
    second = max(others, key=len, default=[])
    if len(second) <= SPLIT_SHARE * len(evidence.names) or len(second) < SMALLEST_SPLIT:
        return
    raise UserError(
        "the photographs fall into sets that share nothing: "
        f"{_describe_set(evidence, registered)}, and {_describe_set(evidence, second)}; put them "
        "into folders of their own, or add photographs that show both"
    )


def _describe_set(evidence: Evidence, names: Collection[str]) -> str:
    members = [name for name in evidence.names if name in names]
    return f"{len(members)} from {members[0]} to {members[-1]}"


def _quality(evidence: Evidence, n_registered: int) -> str:
    share = n_registered / len(evidence.names)
    if share < USABLE_SHARE or evidence.spread < NARROW:
        return "poor"
    is_precise = share >= FINE_SHARE and evidence.error <= FINE_ERROR
    if is_precise and n_registered >= FINE_IMAGES and not evidence.warnings:
        return FINE
    return "usable"


def _why_nothing(evidence: Evidence) -> str:
    n = len(evidence.names)
    blurred = [index for index in range(n) if _is_blurred(evidence, index)]
    bare = [count for count in evidence.n_features if count < FEW_FEATURES]
    if len(blurred) > n / 2:
        reason = f"{len(blurred)} of them are blurred; hold the camera still, with more light"
    elif len(bare) > n / 2 and evidence.masked:
        reason = _LESS_MASKED
    elif len(bare) > n / 2:
        reason = (
            f"{len(bare)} of them show too little texture (fewer than {FEW_FEATURES} features); "
            "put something patterned below the object, such as a newspaper"
        )
    elif evidence.matches:
        reason = (
            f"{len(evidence.matches)} pairs match, but none from two places far enough apart; "
            "walk around the object instead of turning on the spot"
        )
    else:
        reason = (
            "they do not overlap; take them so that neighbouring ones share two thirds of what "
            "they show"
        )
    return f"the {n} photographs could not be brought together: {reason}"


def _is_blurred(evidence: Evidence, index: int) -> bool:
    """Whether an image failed because it is blurred.

    One with many features that match nowhere is of another place, and smooth there.
    """
    if evidence.sharpness[index] >= BLURRED:
        return False
    if evidence.n_features[index] < MANY_FEATURES:
        return True
    return any(index in pair for pair in evidence.matches)


def _reason(evidence: Evidence, index: int, registered: Collection[str]) -> str:
    """Explain why an image is not registered."""
    partners = _partners(evidence, index)
    if _is_blurred(evidence, index):
        return "blurred"
    if evidence.n_features[index] < FEW_FEATURES:
        return f"too little texture, {evidence.n_features[index]} features"
    if not partners:
        return "matches no other photograph"
    for number, model in enumerate(evidence.models[1:], start=2):
        if evidence.names[index] in model:
            return f"belongs to part {number}, which shares too little with the rest"
    counts = [count for name, count in partners.items() if name in registered]
    if not counts or max(counts) == 0:
        return "matches only photographs that are not registered either"
    return f"too few matches, {max(counts)} at most"


def _partners(evidence: Evidence, index: int) -> dict[str, int]:
    """Return the number of matches of an image with each other one, by name."""
    partners = {}
    for (first, second), count in evidence.matches.items():
        if first == index:
            partners[evidence.names[second]] = count
        elif second == index:
            partners[evidence.names[first]] = count
    return partners


def _advice(evidence: Evidence, registered: Collection[str]) -> list[str]:
    """Say what would improve the registration, the most important first."""
    advice = []
    if evidence.masked and len(registered) < USABLE_SHARE * len(evidence.names):
        advice.append(_LESS_MASKED)
    if evidence.contradicting:
        names = []
        for name, (n_wrong, n_pairs) in evidence.contradicting.items():
            names.append(f"{name} ({n_wrong} of {n_pairs} pairs)")
        advice.append(f"remove or retake {shortened(names)}, whose matches contradict their poses")
    if evidence.spread < NARROW:
        advice.append("the camera hardly moved: walk around the object, do not turn on the spot")
    gaps = _gaps(evidence.names, registered)[:_MOST_GAPS]
    if gaps:
        where = gaps[-1]
        if len(gaps) > 1:
            where = f"{', '.join(gaps[:-1])} and {gaps[-1]}"
        advice.append(f"add photographs {where}")
    loose = _loose_images(evidence)
    if loose and not gaps:
        advice.append(f"add photographs around {shortened(loose)}, which hang by few points")
    if evidence.error > FINE_ERROR:
        remedy = "do not zoom between photographs, or try --camera FULL_OPENCV"
        if evidence.given:
            remedy = "check that the cameras belong to these photographs, or pass --cameras none"
        advice.append(f"the lens fits badly: {remedy}")
    return advice


def _loose_images(evidence: Evidence) -> list[str]:
    """Return the registered images that share few points with every other image."""
    shared = evidence.shared or {}
    return [name for name in evidence.names if name in shared and shared[name] < LOOSE_POINTS]


def _gaps(names: Sequence[str], registered: Collection[str]) -> list[str]:
    """Describe where runs of images that are not registered are, the longest run first."""
    groups = itertools.groupby(range(len(names)), lambda index: names[index] in registered)
    runs = [list(run) for is_registered, run in groups if not is_registered]
    texts = []
    for run in sorted(runs, key=len, reverse=True):
        first = run[0]
        last = run[-1]
        before = names[first - 1]
        after = names[(last + 1) % len(names)]
        if first == 0:
            texts.append(f"before {after}")
        elif last == len(names) - 1:
            texts.append(f"after {before}")
        else:
            texts.append(f"between {before} and {after}")
    return texts


class ModelFacts(NamedTuple):
    """Measurements of a reconstruction."""

    shared: dict[str, int]  # most points that each image shares with another one, by name
    spread: float  # camera path extent / distance to the scene


def model_facts(model: pycolmap.Reconstruction) -> ModelFacts:
    """Measure a ``pycolmap.Reconstruction``."""
    numbers = sorted(model.reg_image_ids())
    index_of = {number: index for index, number in enumerate(numbers)}
    n = len(numbers)
    common_points = np.zeros((n, n), np.int64)
    distance_sums = np.zeros(n)
    point_counts = np.zeros(n)
    centers = np.stack([model.images[number].projection_center() for number in numbers])
    for point in model.points3D.values():
        image_ids = [element.image_id for element in point.track.elements]
        rows = np.unique([index_of[image_id] for image_id in image_ids if image_id in index_of])
        common_points[np.ix_(rows, rows)] += 1
        distance_sums[rows] += np.linalg.norm(centers[rows] - point.xyz, axis=1)
        point_counts[rows] += 1
    np.fill_diagonal(common_points, 0)
    shared = {}
    for number, index in index_of.items():
        shared[model.images[number].name] = int(common_points[index].max(initial=0))
    has_points = point_counts > 0
    if not has_points.any():
        return ModelFacts(shared, 0.0)
    distance = float(np.median(distance_sums[has_points] / point_counts[has_points]))
    extent = float(np.linalg.norm(np.ptp(centers, axis=0)))
    return ModelFacts(shared, extent / distance if distance else 0.0)
