# SPDX-License-Identifier: Apache-2.0
"""What came out, in words that a person can act on, and the page about it."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

from gaussian_splatting.data.cameras import up_direction, upright_rotation
from sugar_utils.errors import UserError, shortened
from sugar_utils.html import Page, Picture, duration_text
from sugar_utils.memory import format_bytes

BLURRED = 0.35
"""Sharpness below which a photograph is called blurred. At 800 pixels those that it was set by have
0.56 to 0.68, and after a Gaussian blur of one pixel 0.38 to 0.44, of two pixels 0.17 to 0.24."""

FEW_FEATURES = 200
MANY_FEATURES = 1_000  # a photograph with so many, none of which match, is of another place
FINE_SHARE = 0.95
USABLE_SHARE = 0.75
FINE_ERROR = 1.5  # mean reprojection error in pixels of the size that features were looked for at
LOOSE_POINTS = 60  # a photograph that shares fewer points with every other hangs by little
SPLIT_SHARE = 0.2  # a second model with more of the photographs means two sets
NARROW = 0.05  # camera path extent / distance to the scene; below, depth is a guess

_LESS_MASKED = (
    "the masks leave too little to go by; if the background stood still, pass --masked_features "
    "False, which uses them for all but the cameras"
)

MAP_SIZE = 1000
_MARGIN = 60
_MAX_POINTS = 60_000
_LABELS = 40
_THUMBNAIL = 320
_MAX_LEFT_OUT_PICTURES = 12
_MEANING = {
    "fine": "Go on and train.",
    "usable": "Go on and train, or do what is advised below for a better result.",
    "poor": "The result will have holes or be wrong; better do what is advised below.",
}


@dataclass(frozen=True)
class Evidence:
    """What is known of all photographs, in their order."""

    names: Sequence[str]
    sharpness: Sequence[float]  # of each, (N,)
    n_features: Sequence[int]  # found in each, (N,)
    matches: Mapping[tuple[int, int], int]
    models: Sequence[Sequence[str]]
    n_points: int = 0
    track_length: float = 0.0
    error: float = 0.0
    shared: Mapping[str, int] | None = None
    spread: float = 1.0
    masked: bool = False
    given: bool = False  # cameras are those of another program
    contradicting: Mapping[str, tuple[int, int]] | None = None


@dataclass(frozen=True)
class Registration:
    word: str  # ``fine``, ``usable`` or ``poor``
    n_registered: int
    left_out: list[tuple[str, str]]
    other_models: list[list[str]]
    advice: list[str]

    def line(self, evidence: Evidence) -> str:
        n = len(evidence.names)
        parts = [f"{self.n_registered} of {n} photographs are registered"]
        if self.left_out:
            told = [f"{name} ({reason})" for name, reason in self.left_out]
            parts.append(f"left out: {shortened(told, 5)}")
        parts += [f"reprojection error {evidence.error:.2f} px", f"{evidence.n_points:,} points"]
        return "; ".join([*parts, f"quality: {self.word}"])


def registration_of(evidence: Evidence) -> Registration:
    if not evidence.models:
        raise UserError(_why_nothing(evidence))
    registered = set(evidence.models[0])
    others = [sorted(set(model) - registered) for model in evidence.models[1:]]
    second = max(others, key=len, default=[])
    if len(second) > SPLIT_SHARE * len(evidence.names) and len(second) >= 3:
        sets = [[n for n in evidence.names if n in names] for names in (registered, second)]
        first, second = (f"{len(own)} from {own[0]} to {own[-1]}" for own in sets)
        raise UserError(
            f"the photographs fall into sets that share nothing: {first}, and {second}; put them "
            "into folders of their own, or add photographs that show both"
        )
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
    return Registration(word, len(registered), left_out, [m for m in others if m], advice)


def _why_nothing(evidence: Evidence) -> str:
    n = len(evidence.names)
    blurred = [k for k in range(n) if _is_blurred(evidence, k)]
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


def _is_blurred(evidence: Evidence, index: int) -> bool:
    """Whether a photograph failed because it is blurred.

    One with many features that match nowhere is of another place, and smooth there.
    """
    unrelated = evidence.n_features[index] >= MANY_FEATURES
    unrelated = unrelated and not any(index in pair for pair in evidence.matches)
    return evidence.sharpness[index] < BLURRED and not unrelated


def _reason(evidence: Evidence, index: int, registered: Collection[str]) -> str:
    partners = {
        evidence.names[i if j == index else j]: count
        for (i, j), count in evidence.matches.items()
        if index in (i, j)
    }
    if _is_blurred(evidence, index):
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
        return "matches only photographs that are not registered either"
    return f"too few matches, {inside} at most"


def _advice(evidence: Evidence, registered: Collection[str]) -> list[str]:
    advice = []
    if evidence.masked and len(registered) < USABLE_SHARE * len(evidence.names):
        advice.append(_LESS_MASKED)
    if evidence.contradicting:
        wrong = evidence.contradicting.items()
        named = [f"{name} ({n_wrong} of {n} pairs)" for name, (n_wrong, n) in wrong]
        advice.append(f"remove or retake {shortened(named)}, whose matches contradict their poses")
    if evidence.spread < NARROW:
        advice.append("the camera hardly moved: walk around the object, do not turn on the spot")
    gaps = _gaps(evidence.names, registered)[:3]
    if gaps:
        where = " and ".join(filter(None, (", ".join(gaps[:-1]), gaps[-1])))
        advice.append(f"add photographs {where}")
    loose = [name for name, count in (evidence.shared or {}).items() if count < LOOSE_POINTS]
    loose = [name for name in evidence.names if name in loose]
    if loose and not gaps:
        advice.append(f"add photographs around {shortened(loose)}, which hang by few points")
    if evidence.error > FINE_ERROR:
        given = "check that the cameras belong to these photographs, or pass --cameras none"
        zoomed = "do not zoom between photographs, or try --camera FULL_OPENCV"
        advice.append(f"the lens fits badly: {given if evidence.given else zoomed}")
    return advice


def _gaps(names: Sequence[str], registered: Collection[str]) -> list[str]:
    """Where runs of photographs that are not registered are, the longest run first."""
    groups = itertools.groupby(range(len(names)), lambda index: names[index] in registered)
    runs = [list(run) for inside, run in groups if not inside]
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


def model_facts(model) -> tuple[dict[str, int], float]:
    """What the result needs of a reconstruction beside its counts."""
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


_PAPER = (250, 250, 248)
_INK = (30, 30, 30)
_PATH = (226, 200, 190)
_CAMERA = (214, 69, 52)
_FIRST = (36, 110, 185)


def convert_page(
    title: str,
    evidence: Evidence,
    registration: Registration,
    findings: Sequence[tuple[str, str, str]],
    seen_from_above: np.ndarray,
    directions: Picture,
    files: Mapping[str, Path],
    steps: Sequence[tuple[str, float, int]],
    settings: Mapping[str, object],
) -> Page:
    """The page about a registration; findings are what, where, and what to do."""
    n = len(evidence.names)
    page = Page(title, f"{n} photographs")
    page.facts(
        [
            ("registered photographs", f"{registration.n_registered} of {n}"),
            ("quality", registration.word),
            ("reprojection error", f"{evidence.error:.2f} px"),
            ("points", evidence.n_points),
            ("photographs per point", f"{evidence.track_length:.1f}"),
        ]
    )
    page.paragraph(_MEANING[registration.word], note=registration.word == "poor")
    for advice in registration.advice:
        page.paragraph(advice[0].upper() + advice[1:] + ".", note=True)
    if findings:
        page.heading("What is likely to go wrong")
        page.table(("what", "where", "what to do"), findings, text_columns=3)
    page.heading("Where the photographs were taken")
    caption = (
        "From above: the cameras, where they look, and their numbers in the order of the "
        "photographs. Blue is the first one."
    )
    page.wide_picture(Picture(seen_from_above, caption, "Map of the cameras"))
    page.wide_picture(directions)
    for number, names in enumerate(registration.other_models, start=2):
        text = f"Part {number}, which shares too little with the rest: {', '.join(names)}"
        page.paragraph(text, note=True)
    if registration.left_out:
        page.heading("Photographs without a place")
        page.table(("photograph", "why"), registration.left_out, text_columns=2)
        shown = registration.left_out[:_MAX_LEFT_OUT_PICTURES]
        pictures = [Picture(files[name], f"{name}: {reason}") for name, reason in shown]
        page.pictures(pictures, width=_THUMBNAIL)
    page.heading("All photographs")
    page.pairs(_all_photographs(evidence), folded=f"{n} photographs")
    page.heading("What it took")
    page.table(
        ("step", "time", "peak memory"),
        [(name, duration_text(seconds), format_bytes(peak)) for name, seconds, peak in steps],
    )
    page.pairs(settings.items(), folded="settings")
    return page


def _all_photographs(evidence: Evidence) -> Iterator[tuple[str, str]]:
    shared = evidence.shared or {}
    partners = Counter(itertools.chain(*evidence.matches))
    for index, name in enumerate(evidence.names):
        sharp = evidence.sharpness[index]
        blurred = " (blurred)" if sharp < BLURRED else ""
        place = "not registered"
        if name in shared:
            place = f"shares {shared[name]:,} points with its nearest"
        yield (
            f"{index + 1}  {name}",
            f"sharpness {sharp:.2f}{blurred}, {evidence.n_features[index]:,} features, matches "
            f"{partners[index]} others, {place}",
        )


def camera_map(model: Any, names: Sequence[str]) -> np.ndarray:
    """Cameras and points of a reconstruction from above. (MAP_SIZE, MAP_SIZE, 3) uint8"""
    images = {model.images[n].name: model.images[n] for n in model.reg_image_ids()}
    numbers = [number for number, name in enumerate(names, start=1) if name in images]
    ordered = [images[names[number - 1]] for number in numbers]
    poses = np.stack([image.cam_from_world().matrix() for image in ordered])
    centers = np.stack([image.projection_center() for image in ordered])
    kept = sorted(model.point3D_ids())
    kept = kept[:: max(1, len(kept) // _MAX_POINTS)]
    points = np.array([model.points3D[n].xyz for n in kept]).reshape(-1, 3)
    colors = np.array([model.points3D[n].color for n in kept], np.uint8).reshape(-1, 3)
    up = up_direction(poses[:, :, :3], points)
    level = upright_rotation(up, centers[0] - centers.mean(axis=0))[[0, 2]]
    at = centers @ level.T
    looks = poses[:, 2, :3] @ level.T
    seen = points @ level.T
    near = np.percentile(seen, (5, 95), axis=0) if len(seen) else at
    both = np.concatenate([at, near])
    low = both.min(axis=0)
    high = both.max(axis=0)
    middle = (low + high) / 2
    scale = (MAP_SIZE - 2 * _MARGIN) / max(float((high - low).max()), 1e-9)

    def pixels(places: np.ndarray) -> np.ndarray:
        return (places - middle) * scale + MAP_SIZE / 2

    paper = np.full((MAP_SIZE, MAP_SIZE, 3), _PAPER, np.uint8)
    x, y = pixels(seen).astype(int).T if len(seen) else np.zeros((2, 0), int)
    inside = (x >= 0) & (x < MAP_SIZE) & (y >= 0) & (y < MAP_SIZE)
    # Low points first, so that what lies on top is seen on top.
    order = np.argsort(points[inside] @ up, kind="stable")
    paper[y[inside][order], x[inside][order]] = colors[inside][order]
    picture = Image.fromarray(paper)
    _draw_cameras(ImageDraw.Draw(picture), pixels(at), looks, numbers)
    return np.asarray(picture)


def _draw_cameras(
    draw: ImageDraw.ImageDraw, at: np.ndarray, looks: np.ndarray, numbers: Sequence[int]
) -> None:
    draw.line([tuple(place) for place in at], fill=_PATH, width=1)
    every = -(-len(at) // _LABELS)
    for k in range(len(at) - 1, -1, -1):
        color = _FIRST if k == 0 else _CAMERA
        ahead = at[k] + 22 * looks[k]
        draw.line([tuple(at[k]), tuple(ahead)], fill=color, width=3)
        radius = 7 if k == 0 else 4
        draw.ellipse([*(at[k] - radius), *(at[k] + radius)], fill=color, outline=_INK)
        if k % every == 0:
            # Behind the camera, where its line of sight is not.
            draw.text(tuple(at[k] - 14 * looks[k]), str(numbers[k]), fill=_INK, anchor="mm")
