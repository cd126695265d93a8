# SPDX-License-Identifier: Apache-2.0
"""The images that are registered, and the registration that the steps hand on."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

from gaussian_splatting.data.cameras import ViewMask
from sugar_capture.convert_options import Mapper, SfmOptions
from sugar_capture.features import matching
from sugar_capture.features.photographs import Photograph
from sugar_capture.known_cameras import KnownCameras
from sugar_capture.pairs.chosen_pairs import Matcher, Pair, chosen_matcher
from sugar_capture.registration.mapping import MappingOptions, Models, chosen_mapper
from sugar_capture.scene_folder import Work, note
from sugar_utils.errors import Advance


@dataclass(frozen=True)
class Registration:
    """Models of a capture, and the database that they are made of."""

    key: str  # digest of all that it depends on
    database: Path  # of features and matches
    models: Models
    similar_by: Path  # database of the SIFT features by which similar images are found
    folder: Path | None = None  # of the models; None: there are none
    in_masks: bool = False  # features are those inside of masks
    # Names of the images that a step added to the largest model, by its label; without those of
    # the steps that every capture has.
    registered_by: Mapping[str, Sequence[str]] = field(default_factory=dict)
    omitted: Sequence[str] = ()  # sentences about steps for which there was no time


@dataclass(frozen=True)
class Capture:
    """The images of a capture, and the settings by which they are registered."""

    work: Work
    photographs: Sequence[Photograph]
    masks: Sequence[ViewMask | None]  # of each image
    content: str  # digest of the images and of cameras of other programs
    masked_content: str  # the same, with the masks
    known: KnownCameras | None = None
    of_panoramas: bool = False  # the images are views of panoramas
    keeps_focal: bool = False  # one circle of cameras does not determine the focal length

    @property
    def n(self) -> int:
        """Number of images."""
        return len(self.photographs)

    @property
    def names(self) -> list[str]:
        """Of the images, in the order of their numbers in the database."""
        return [photograph.name for photograph in self.photographs]

    @property
    def sfm(self) -> SfmOptions:
        """Settings of features, matching and mapping."""
        return self.work.options.sfm

    @property
    def seed(self) -> int:
        """Random seed of matching and mapping."""
        return self.work.options.random_seed

    @property
    def matcher(self) -> Matcher:
        """The matcher that is used."""
        in_order = self.work.source.video is not None
        return chosen_matcher(self.sfm.matcher, self.n, in_order)

    @property
    def mapper(self) -> Mapper:
        """The mapper that is used."""
        return chosen_mapper(self.sfm.mapper, self.n)

    @property
    def mapping_options(self) -> MappingOptions:
        """Settings of the mapper."""
        return MappingOptions(
            mapper=self.mapper,
            seed=self.seed,
            keeps_lenses=self.of_panoramas,
            keeps_focal=self.keeps_focal,
        )

    def pixel_sizes(self, extraction_size: int) -> dict[int, float]:
        """Return pixels of the file per pixel at which features are extracted, by image index.

        Args:
            extraction_size: Longest side in pixels at which they are extracted.
        """
        sizes = {}
        for index, photograph in enumerate(self.photographs):
            longest_side = max(photograph.width, photograph.height)
            sizes[index] = max(1.0, longest_side / extraction_size)
        return sizes

    def path(self, name: str) -> Path:
        """Return a file or folder among those that are kept for later calls."""
        return self.work.source.work / name

    def start(self, in_masks: bool) -> Registration:
        """Return the registration before the first step.

        Args:
            in_masks: Features are those inside of masks.
        """
        database = self.path("masked_database.db" if in_masks else "database.db")
        return Registration(
            key=self.masked_content if in_masks else self.content,
            database=database,
            models=Models(None, []),
            in_masks=in_masks,
            similar_by=database,
        )

    def unregistered(self, models: Models) -> list[int]:
        """Return the indices of the images without a pose in the largest model."""
        registered = set(models.names)
        return [index for index, name in enumerate(self.names) if name not in registered]

    def step(self, title: str, total: int) -> AbstractContextManager[Advance]:
        """Show progress, see :meth:`~sugar_capture.scene_folder.Work.step`."""
        return self.work.step(title, total)

    def match_pairs(self, database: Path, pairs: Collection[Pair], title: str) -> None:
        """Match pairs of image indices that the database does not have yet."""
        if not pairs:
            return
        with self.step(title, len(pairs)) as advance:
            matching.match_pairs(database, sorted(pairs), self.seed, advance)

    def noted(self, name: str, key: str) -> bool:
        """Whether an earlier call noted a fact with this value."""
        return self.work.noted(name, key)

    def note(self, **facts: str | None) -> None:
        """Note facts for later calls; None removes one."""
        note(self.work.source, **facts)
