# SPDX-License-Identifier: Apache-2.0
"""What came out, in words that a person can act on: what was left out and why, and what to do."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from gaussian_splatting.posing.photographs import shortened
from sugar_utils.errors import UserError

BLURRED = 0.35
"""Sharpness below which a photograph is called blurred. At 800 pixels those that it was set by have
0.56 to 0.68, and after a Gaussian blur of one pixel 0.38 to 0.44, of two pixels 0.17 to 0.24."""

FEW_FEATURES = 200
FINE_SHARE, USABLE_SHARE = 0.95, 0.75
FINE_ERROR = 1.5
"""Mean reprojection error in pixels of the size that features were looked for at."""

LOOSE_POINTS = 60
"""A photograph that shares fewer points with every other hangs by little."""

SPLIT_SHARE = 0.2
"""A second model with more of the photographs than this means two sets, not stragglers."""

NARROW = 0.05
"""Extent of the cameras' path, in distances to what they see, below which depth is a guess."""


_LESS_MASKED = (
    "the masks leave too little to go by; if the background stood still, pass --masked_features "
    "False, which uses them for all but the cameras"
)


@dataclass(frozen=True)
class Evidence:
    """What is known of all photographs, in their order.

    Attributes:
        names: Of the photographs.
        sharpness: Of each. (N,)
        n_features: Found in each. (N,)
        matches: Verified matches by pair of places.
        models: Names in each model, the largest first.
        n_points: Points of the largest model.
        track_length: Photographs that see a point of it, on average.
        error: Its mean reprojection error, pixels of the size that features were looked for at.
        shared: For each photograph of the largest model most points that it shares with another.
        spread: Extent of its camera path in median distances to the points.
        masked: Whether features were looked for only where masks count.
        contradicting: Photographs most of whose pairs contradict their poses: how many of how many.
    """

    names: Sequence[str]
    sharpness: Sequence[float]
    n_features: Sequence[int]
    matches: Mapping[tuple[int, int], int]
    models: Sequence[Sequence[str]]
    n_points: int = 0
    track_length: float = 0.0
    error: float = 0.0
    shared: Mapping[str, int] | None = None
    spread: float = 1.0
    masked: bool = False
    contradicting: Mapping[str, tuple[int, int]] | None = None


@dataclass(frozen=True)
class Verdict:
    """What is said in the end.

    Attributes:
        word: ``fine``, ``usable`` or ``poor``.
        n_registered: Photographs with a place.
        left_out: Name and reason of each other photograph, in order.
        other_models: Photographs of further models that the largest lacks, by model.
        advice: Sentences about what to do, the most useful first; may be empty.
    """

    word: str
    n_registered: int
    left_out: list[tuple[str, str]]
    other_models: list[list[str]]
    advice: list[str]

    def line(self, evidence: Evidence) -> str:
        """All that matters in one line."""
        n = len(evidence.names)
        parts = [f"{self.n_registered} of {n} photographs have a place"]
        if self.left_out:
            told = [f"{name} ({reason})" for name, reason in self.left_out]
            parts.append(f"left out: {shortened(told, 5)}")
        parts.append(f"reprojection error {evidence.error:.2f} px")
        parts.append(f"{evidence.n_points:,} points")
        parts.append(f"verdict: {self.word}")
        return "; ".join(parts + self.advice[:2])


def verdict_of(evidence: Evidence) -> Verdict:
    """Judge a reconstruction.

    Raises:
        UserError: There is none, or the photographs fall into sets that share nothing.
    """
    if not evidence.models:
        raise UserError(_why_nothing(evidence))
    registered = set(evidence.models[0])
    others = [sorted(set(model) - registered) for model in evidence.models[1:]]
    _refuse_two_sets(evidence, registered, others)
    left_out = [
        (name, _reason(evidence, index, registered))
        for index, name in enumerate(evidence.names)
        if name not in registered
    ]
    share = len(registered) / len(evidence.names)
    advice = _advice(evidence, registered)
    word = "poor"
    if share >= USABLE_SHARE and evidence.spread >= NARROW:
        word = "fine" if share >= FINE_SHARE and evidence.error <= FINE_ERROR else "usable"
    return Verdict(word, len(registered), left_out, [m for m in others if m], advice)


def _why_nothing(evidence: Evidence) -> str:
    """One line about photographs of which not even a few hang together."""
    n = len(evidence.names)
    blurred = [x for x in evidence.sharpness if x < BLURRED]
    bare = [x for x in evidence.n_features if x < FEW_FEATURES]
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


def _refuse_two_sets(
    evidence: Evidence, registered: Collection[str], others: Sequence[Sequence[str]]
) -> None:
    n = len(evidence.names)
    second = max(others, key=len, default=[])
    if len(second) <= SPLIT_SHARE * n or len(second) < 3:
        return
    first = [name for name in evidence.names if name in registered]
    second = [name for name in evidence.names if name in second]
    raise UserError(
        f"the photographs fall into sets that share nothing: {len(first)} from {first[0]} to "
        f"{first[-1]}, and {len(second)} from {second[0]} to {second[-1]}; put them into folders "
        "of their own, or add photographs that show both"
    )


def _reason(evidence: Evidence, index: int, registered: Collection[str]) -> str:
    """Why a photograph has no place."""
    partners = {
        evidence.names[i if j == index else j]: count
        for (i, j), count in evidence.matches.items()
        if index in (i, j)
    }
    if evidence.sharpness[index] < BLURRED:
        return "blurred"
    if evidence.n_features[index] < FEW_FEATURES:
        return f"too little texture, {evidence.n_features[index]} features"
    if not partners:
        return "matches no other photograph"
    for number, model in enumerate(evidence.models[1:], start=2):
        if evidence.names[index] in model:
            return f"belongs to part {number}, which shares too little with the rest"
    inside = max((count for name, count in partners.items() if name in registered), default=0)
    if not inside:
        return "matches only photographs that have no place either"
    return f"too few matches, {inside} at most"


def _advice(evidence: Evidence, registered: Collection[str]) -> list[str]:
    advice = []
    if evidence.masked and len(registered) < USABLE_SHARE * len(evidence.names):
        advice.append(_LESS_MASKED)
    if evidence.contradicting:
        named = [
            f"{name} ({wrong} of {n} pairs)" for name, (wrong, n) in evidence.contradicting.items()
        ]
        advice.append(f"remove or retake {shortened(named)}, whose matches contradict their poses")
    if evidence.spread < NARROW:
        advice.append("the camera hardly moved: walk around the object, do not turn on the spot")
    gaps = [_gap_text(evidence.names, run) for run in _gaps(evidence.names, registered)]
    if gaps:
        advice.append(f"add photographs {_joined(gaps[:3])}")
    loose = [name for name, count in (evidence.shared or {}).items() if count < LOOSE_POINTS]
    loose = [name for name in evidence.names if name in loose]
    if loose and not gaps:
        advice.append(f"add photographs around {shortened(loose)}, which hang by few points")
    blurred = [
        name for name, x in zip(evidence.names, evidence.sharpness, strict=True) if x < BLURRED
    ]
    if blurred:
        advice.append(f"replace the blurred ones: {shortened(blurred)}")
    if evidence.error > FINE_ERROR:
        advice.append(
            "the lens fits badly: do not zoom between photographs, or try --camera FULL_OPENCV"
        )
    return advice


def _gaps(names: Sequence[str], registered: Collection[str]) -> list[tuple[int, int]]:
    """Runs of photographs without a place, as their first and last index, the longest first."""
    runs: list[tuple[int, int]] = []
    for index, name in enumerate(names):
        if name in registered:
            continue
        if runs and runs[-1][1] == index - 1:
            runs[-1] = (runs[-1][0], index)
        else:
            runs.append((index, index))
    return sorted(runs, key=lambda run: run[0] - run[1])


def _gap_text(names: Sequence[str], run: tuple[int, int]) -> str:
    first, last = run
    if first == 0:
        return f"before {names[last + 1]}"
    if last == len(names) - 1:
        return f"after {names[first - 1]}"
    return f"between {names[first - 1]} and {names[last + 1]}"


def _joined(texts: Sequence[str]) -> str:
    return texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} and {texts[-1]}"


def model_facts(model) -> tuple[dict[str, int], float]:
    """What the verdict needs of a reconstruction beside its counts.

    Args:
        model: pycolmap's reconstruction.

    Returns:
        For each photograph most points that it shares with another one; and the extent of the
        cameras' path in median distances from cameras to points.
    """
    numbers = sorted(model.reg_image_ids())
    place = {number: k for k, number in enumerate(numbers)}
    common = np.zeros((len(numbers), len(numbers)), np.int64)
    sums = np.zeros(len(numbers))
    counts = np.zeros(len(numbers))
    centers = np.stack([model.images[n].projection_center() for n in numbers])
    for point in model.points3D.values():
        rows = np.unique([place[e.image_id] for e in point.track.elements if e.image_id in place])
        common[np.ix_(rows, rows)] += 1
        sums[rows] += np.linalg.norm(centers[rows] - point.xyz, axis=1)
        counts[rows] += 1
    np.fill_diagonal(common, 0)
    shared = {model.images[n].name: int(common[k].max(initial=0)) for n, k in place.items()}
    distance = float(np.median(sums[counts > 0] / counts[counts > 0])) if counts.any() else 0.0
    extent = float(np.linalg.norm(np.ptp(centers, axis=0)))
    return shared, extent / distance if distance else 0.0
