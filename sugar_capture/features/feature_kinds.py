# SPDX-License-Identifier: Apache-2.0
"""Further kinds of features, each of which finds what those before it do not."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import numpy as np
from scipy.ndimage import gaussian_filter

from sugar_capture.features import matching
from sugar_capture.features.learned_features import (
    LearnedFeatures,
    LearnedWeights,
    find_weights,
    load_networks,
)
from sugar_capture.features.matching import ImagePairs, SiftVariant
from sugar_capture.features.photographs import Photograph
from sugar_utils.errors import Advance
from sugar_utils.files import file_digest
from sugar_utils.recipe import digest_of

LastFeatures = Literal["auto", "sift", "contrast", "affine", "learned"]
KINDS = get_args(LastFeatures)[1:]
"""Names of the kinds in order, as ``--features`` has them; every capture has the first one."""

_FAINT_PEAK = 0.002  # least contrast of a feature; COLMAP's is 0.0067
_NOISE_WINDOW = 2.0  # pixels, standard deviation of the blur that removes noise
_STRETCHED = (1.0, 99.0)  # percent of the pixels that become black, and that stay below white


@dataclass(frozen=True)
class FeatureInputs:
    """The photographs of a capture, and the limits of all kinds of features."""

    photographs: Sequence[Photograph]
    longest_side: int  # pixels at which features are extracted
    max_features: int  # of a photograph
    seed: int


class FeatureKind(ABC):
    """A kind of features, for images that those of the kinds before it do not register.

    Attributes:
        name: As ``--features`` has it; also the beginning of names of files and notes.
        label: For messages and pages.
        extraction_cost: Time that features of a photograph take, in times of SIFT's.
        matching_cost: Time that a pair takes, in times of SIFT's.
    """

    name: str
    label: str
    extraction_cost: float
    matching_cost: float

    # Longest side in pixels at which features are looked for, and the most of a photograph; None:
    # those of the features of every capture.
    limits: tuple[int, int] | None = None

    @abstractmethod
    def key(self) -> str:
        """Return a digest of all that the features depend on beside photographs and limits."""

    @abstractmethod
    def extract(
        self, path: Path, inputs: FeatureInputs, indices: Sequence[int], advance: Advance
    ) -> None:
        """Write the features of images that have none in the database yet."""

    @abstractmethod
    def match(self, path: Path, inputs: FeatureInputs, pairs: ImagePairs, advance: Advance) -> None:
        """Match and verify pairs of images that are not in the database yet."""


@dataclass(frozen=True)
class SiftKind(FeatureKind):
    """SIFT in another variant; its features are matched as those of every capture."""

    name: str
    label: str
    extraction_cost: float
    matching_cost: float
    variant: SiftVariant
    limits: tuple[int, int] | None = None

    def key(self) -> str:
        """Return a digest of the variant."""
        variant = self.variant
        prepared = None if variant.prepare is None else variant.prepare.__name__
        return digest_of(variant.affine, variant.peak_threshold, variant.features_factor, prepared)

    def extract(
        self, path: Path, inputs: FeatureInputs, indices: Sequence[int], advance: Advance
    ) -> None:
        """Write the features of images that have none in the database yet."""
        matching.extract_features(
            path,
            inputs.photographs,
            inputs.longest_side,
            inputs.max_features,
            advance,
            indices,
            self.variant,
        )

    def match(self, path: Path, inputs: FeatureInputs, pairs: ImagePairs, advance: Advance) -> None:
        """Match and verify pairs of images that are not in the database yet."""
        matching.match_pairs(path, pairs, inputs.seed, advance)


@dataclass(frozen=True)
class LearnedKind(FeatureKind):
    """ALIKED features, matched by LightGlue; the networks are loaded when they are first used."""

    weights: LearnedWeights
    name: str = "learned"
    label: str = "ALIKED and LightGlue"
    # Assumed: its weights were not at hand to measure them.
    extraction_cost: float = 4.0
    matching_cost: float = 30.0

    def key(self) -> str:
        """Return a digest of the weights."""
        return digest_of(file_digest(self.weights.extractor), file_digest(self.weights.matcher))

    def extract(
        self, path: Path, inputs: FeatureInputs, indices: Sequence[int], advance: Advance
    ) -> None:
        """Write the features of images that have none in the database yet."""
        features = LearnedFeatures(load_networks(self.weights), inputs.photographs)
        features.extract(path, inputs.longest_side, indices, advance)

    def match(self, path: Path, inputs: FeatureInputs, pairs: ImagePairs, advance: Advance) -> None:
        """Match and verify pairs of images that are not in the database yet."""
        features = LearnedFeatures(load_networks(self.weights), inputs.photographs)
        features.match(path, pairs, inputs.seed, advance)


def stretch_contrast(grey: np.ndarray) -> np.ndarray:
    """Return an image without noise of single pixels, from black to white.

    Args:
        grey: (H, W) uint8

    Returns:
        (H, W) uint8
    """
    smooth = gaussian_filter(grey.astype(np.float32), _NOISE_WINDOW)
    low, high = np.percentile(smooth, _STRETCHED)
    stretched = 255 * (smooth - low) / max(high - low, 1.0)
    return stretched.clip(0, 255).astype(np.uint8)


CONTRAST = SiftKind(
    name="contrast",
    label="SIFT of stretched contrast",
    extraction_cost=1.2,
    matching_cost=1.2,
    variant=SiftVariant(prepare=stretch_contrast),
)
AFFINE = SiftKind(
    name="affine",
    label="affine SIFT",
    extraction_cost=1.6,
    matching_cost=1.4,
    variant=SiftVariant(affine=True, peak_threshold=_FAINT_PEAK, features_factor=2),
)


def sift_at(limits: tuple[int, int], earlier: tuple[int, int]) -> SiftKind:
    """Return SIFT with more features than those that were looked for at first.

    Args:
        limits: Longest side in pixels, and the most features of a photograph.
        earlier: The same of the first features, in times of which its costs are.
    """
    extraction_cost = (limits[0] / earlier[0]) ** 2
    return SiftKind(
        name="full",
        label="more SIFT features",
        extraction_cost=extraction_cost,
        matching_cost=min(limits[1] / earlier[1], extraction_cost) ** 2,
        variant=SiftVariant(),
        limits=limits,
    )


def kinds_up_to(last: str, weights_folder: Path | None) -> list[FeatureKind]:
    """Return the kinds of features beyond that of every capture, in order.

    Args:
        last: The last kind, or ``auto`` for all that are there.
        weights_folder: Where weights of learned features are; None for COLMAP's cache.

    Raises:
        UserError: Learned features are asked for, and their weights are missing or damaged.
    """
    names = KINDS if last == "auto" else KINDS[: KINDS.index(last) + 1]
    kinds: list[FeatureKind] = [kind for kind in (CONTRAST, AFFINE) if kind.name in names]
    if "learned" in names:
        is_asked_for = last == "learned" or weights_folder is not None
        weights = find_weights(weights_folder, is_asked_for)
        if weights is not None:
            if is_asked_for:
                # Damaged ones are said now, not after all other kinds.
                load_networks(weights)
            kinds.append(LearnedKind(weights))
    return kinds
