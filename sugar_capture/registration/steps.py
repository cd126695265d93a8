# SPDX-License-Identifier: Apache-2.0
"""The loop over the steps of a registration, each of which registers what those before it did not.

The files of a step are kept. They are current while nothing changes that the step depends on: its
settings and the registration before it, whose digest is the key by which they are found again.
"""

from __future__ import annotations

import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from sugar_capture.features.feature_database import database_errors
from sugar_capture.registration import mapping
from sugar_capture.registration.capture import Capture, Registration
from sugar_capture.registration.mapping import Models
from sugar_capture.registration.pose_time import PoseSpeed, known_speed
from sugar_utils.errors import UserError
from sugar_utils.recipe import digest_of


class RegistrationStep(ABC):
    """One step of a registration.

    Attributes:
        name: Of its notes.
        label: For messages and pages.
        is_required: It is made however long it takes.
        is_reported: Pages name the images that it registered.
    """

    name: str
    label: str
    is_required = False
    is_reported = False

    @abstractmethod
    def most_added(self, capture: Capture, before: Registration) -> int:
        """Return the most images that the step may register; with 0 it is skipped."""

    @abstractmethod
    def seconds(self, capture: Capture, before: Registration, speed: PoseSpeed) -> float:
        """Return the seconds that the step is expected to take."""

    @abstractmethod
    def perform(self, capture: Capture, before: Registration) -> Registration:
        """Return the registration after the step, which an earlier call may have made."""


class KeptStep(ABC):
    """A step whose files are kept for later calls, in a folder and with notes of its name."""

    name: str

    @abstractmethod
    def settings(self, capture: Capture) -> tuple[object, ...]:
        """Return all that the result depends on, beside the registration before."""

    @abstractmethod
    def prepare(self, capture: Capture, before: Registration) -> None:
        """Write the files that the step begins with, in place of those of other settings."""

    @abstractmethod
    def run(self, capture: Capture, before: Registration) -> None:
        """Make the step; what an interrupted call left of it is there, and is gone on with.

        Models are written into :meth:`folder`, or the folder is left out where none are added.
        """

    def folder(self, capture: Capture) -> Path:
        """Return the folder of the models."""
        return capture.path(self.name)

    def is_sound(self, capture: Capture, before: Registration) -> bool:
        """Whether the files of an earlier call are there and not damaged."""
        return True

    def database(self, capture: Capture, before: Registration) -> Path:
        """Return the database of the registration after the step."""
        return before.database

    def perform(self, capture: Capture, before: Registration) -> Registration:
        """Return the registration after the step, which an earlier call may have made."""
        key = key_after(self, capture, before)
        is_begun = capture.noted(f"{self.name}_begun", key)
        is_sound = self.is_sound(capture, before)
        path = self.database(capture, before)
        if is_begun and not is_sound:
            capture.work.console.info(f"note: {path} is missing or damaged; made anew")
        with database_errors(path):
            if not (is_begun and is_sound):
                capture.note(**{f"{self.name}_begun": None, self.name: None})
                shutil.rmtree(self.folder(capture), ignore_errors=True)
                self.prepare(capture, before)
                capture.note(**{f"{self.name}_begun": key})
            if capture.noted(self.name, key):
                try:
                    return self.result(capture, before, key)
                except UserError as error:
                    capture.work.console.info(f"registering photographs again: {error}")
                    capture.note(**{self.name: None})
            self.run(capture, before)
        capture.note(**{self.name: key})
        return self.result(capture, before, key)

    def result(self, capture: Capture, before: Registration, key: str) -> Registration:
        """Read the registration after the step from its files."""
        folder = self.folder(capture)
        after = replace(before, key=key, database=self.database(capture, before))
        if not folder.is_dir():
            return after
        return replace(after, models=mapping.read_models(folder), folder=folder)


def key_after(step: KeptStep, capture: Capture, before: Registration) -> str:
    """Return the digest of all that the registration after a step depends on."""
    return digest_of(before.key, *step.settings(capture))


def register(
    capture: Capture, steps: Sequence[RegistrationStep], start: Registration
) -> Registration:
    """Make those steps of a list that may register something and for which there is time."""
    registration = start
    for step in steps:
        n_most = step.most_added(capture, registration)
        if n_most == 0:
            continue
        if not step.is_required and not _fits(step, capture, registration):
            sentence = (
                f"{step.label} for the {n_most} photographs left out would take longer than is left"
            )
            capture.work.console.info(f"note: {sentence}")
            registration = replace(registration, omitted=[*registration.omitted, sentence])
            continue
        after = step.perform(capture, registration)
        if step.is_reported:
            after = _with_label(step, capture, registration.models, after)
        registration = after
    return registration


def _with_label(
    step: RegistrationStep, capture: Capture, before: Models, after: Registration
) -> Registration:
    """Note under the label of a step which images it registered, and say so."""
    added = sorted(set(after.models.names).difference(before.names))
    if not added:
        return after
    capture.work.console.info(
        f"{len(added)} photographs are registered by {step.label}: {after.models.n_registered} of "
        f"{capture.n}"
    )
    return replace(after, registered_by={**after.registered_by, step.label: added})


def _fits(step: RegistrationStep, capture: Capture, before: Registration) -> bool:
    """Whether a step fits in the time that is left."""

    def seconds(speed: PoseSpeed) -> float:
        return step.seconds(capture, before, speed)

    return is_in_time(capture, step.name, before.key, seconds)


def is_in_time(
    capture: Capture, name: str, key: str, seconds: Callable[[PoseSpeed], float]
) -> bool:
    """Whether something fits in the time that is left; noted, so that a later call agrees.

    Args:
        name: Of the note.
        key: Digest of all that the answer is for.
        seconds: Returns the time that it takes at a measured speed.
    """
    limit = capture.work.options.time_limit
    if limit is None:
        return True
    for noted_answer in (True, False):
        if capture.noted(f"{name}_in_time", f"{key} {noted_answer}"):
            return noted_answer
    remaining = limit.most_seconds - sum(finished.seconds for finished in capture.work.steps)
    is_short = False
    if remaining > 0:
        is_short = seconds(known_speed(capture.work, capture.photographs)) <= remaining
    capture.note(**{f"{name}_in_time": f"{key} {is_short}"})
    return is_short
