# SPDX-License-Identifier: Apache-2.0
"""The steps of the feature fallback: kinds of features in their order."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import numpy as np
from scipy.ndimage import gaussian_filter

from sugar_capture import matching
from sugar_capture.convert_options import Features
from sugar_capture.ladder.learned_features import (
    LearnedFeatures,
    LearnedWeights,
    find_weights,
    load_networks,
)
from sugar_capture.matching import SiftVariant
from sugar_capture.photographs import Photograph
from sugar_utils.files import file_digest
from sugar_utils.recipe import digest_of

Advance = Callable[[int], None]
LADDER = get_args(Features)[1:]
"""Names of the steps as ``--features`` has them; the first is that of every capture."""

_FAINT_PEAK = 0.002  # least contrast of a feature; COLMAP's is 0.0067
_NOISE_WINDOW = 2.0  # pixels, standard deviation of the blur that removes noise
_STRETCHED = (1.0, 99.0)  # percent of the pixels that become black, and that stay below white


@dataclass(frozen=True)
class StepInputs:
    """The photographs of a capture, and the limits of all kinds of features."""

    photographs: Sequence[Photograph]
    longest_side: int  # pixels at which features are extracted
    max_features: int  # of a photograph
    seed: int


class FeatureStep(ABC):
    """A kind of features; :class:`~sugar_capture.ladder.climbing.FurtherAttempt` calls it.

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

    @abstractmethod
    def key(self) -> str:
        """Return a digest of all inputs of the features besides the images."""

    @abstractmethod
    def extract(
        self, path: Path, inputs: StepInputs, indices: Sequence[int], advance: Advance
    ) -> None:
        """Write the features of images that have none in the database yet."""

    @abstractmethod
    def match(
        self, path: Path, inputs: StepInputs, pairs: Sequence[tuple[int, int]], advance: Advance
    ) -> None:
        """Match and verify pairs of images that are not in the database yet."""


@dataclass(frozen=True)
class SiftStep(FeatureStep):
    """SIFT in another variant; its features are matched as those of every capture."""

    name: str
    label: str
    extraction_cost: float
    matching_cost: float
    variant: SiftVariant

    def key(self) -> str:
        """Return a digest of the variant."""
        variant = self.variant
        prepared = None if variant.prepare is None else variant.prepare.__name__
        return digest_of(variant.affine, variant.peak_threshold, variant.features_factor, prepared)

    def extract(
        self, path: Path, inputs: StepInputs, indices: Sequence[int], advance: Advance
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

    def match(
        self, path: Path, inputs: StepInputs, pairs: Sequence[tuple[int, int]], advance: Advance
    ) -> None:
        """Match and verify pairs of images that are not in the database yet."""
        matching.match_pairs(path, pairs, inputs.seed, advance)


@dataclass(frozen=True)
class LearnedStep(FeatureStep):
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
        self, path: Path, inputs: StepInputs, indices: Sequence[int], advance: Advance
    ) -> None:
        """Write the features of images that have none in the database yet."""
        features = LearnedFeatures(load_networks(self.weights), inputs.photographs)
        features.extract(path, inputs.longest_side, indices, advance)

    def match(
        self, path: Path, inputs: StepInputs, pairs: Sequence[tuple[int, int]], advance: Advance
    ) -> None:
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


CONTRAST = SiftStep(
    name="contrast",
    label="SIFT of stretched contrast",
    extraction_cost=1.2,
    matching_cost=1.2,
    variant=SiftVariant(prepare=stretch_contrast),
)
AFFINE = SiftStep(
    name="affine",
    label="affine SIFT",
    extraction_cost=1.6,
    matching_cost=1.4,
    variant=SiftVariant(affine=True, peak_threshold=_FAINT_PEAK, features_factor=2),
)


def steps_up_to(last: str, weights_folder: Path | None) -> list[FeatureStep]:
    """Return the steps beyond that of every capture, in order.

    Args:
        last: The last step, or ``auto`` for all that are installed.
        weights_folder: Where weights of learned features are; None for COLMAP's cache.

    Raises:
        UserError: Learned features are asked for, and their weights are missing or damaged.
    """
    names = LADDER if last == "auto" else LADDER[: LADDER.index(last) + 1]
    steps: list[FeatureStep] = [step for step in (CONTRAST, AFFINE) if step.name in names]
    if "learned" in names:
        is_asked_for = last == "learned" or weights_folder is not None
        weights = find_weights(weights_folder, is_asked_for)
        if weights is not None:
            if is_asked_for:
                # Damaged ones are said now, not after all other steps.
                load_networks(weights)
            steps.append(LearnedStep(weights))
    return steps
