# SPDX-License-Identifier: Apache-2.0
"""A capture of three images, and a step of its registration that takes no time."""

from __future__ import annotations

from pathlib import Path

import pycolmap
from PIL import Image

from gaussian_splatting.data.colmap import write_model
from sugar_capture.convert_options import ConvertOptions
from sugar_capture.features.photographs import described_photographs
from sugar_capture.registration.capture import Capture, Registration
from sugar_capture.registration.pose_time import PoseSpeed
from sugar_capture.registration.steps import KeptStep, RegistrationStep
from sugar_capture.scene_folder import Work, find_source
from tests.support.heard_console import Heard

N_IMAGES = 3


class AddsOne(KeptStep, RegistrationStep):
    """Registers the next image, and counts how often it did."""

    label = "a stand-in"

    def __init__(self, name: str, setting: int = 0, cost: float = 1.0) -> None:
        self.name = name
        self.setting = setting
        self.cost = cost
        self.n_runs = 0

    def settings(self, capture: Capture) -> tuple[object, ...]:
        return (self.name, self.setting)

    def most_added(self, capture: Capture, before: Registration) -> int:
        return len(capture.unregistered(before.models))

    def seconds(self, capture: Capture, before: Registration, speed: PoseSpeed) -> float:
        return self.cost

    def prepare(self, capture: Capture, before: Registration) -> None:
        pass

    def run(self, capture: Capture, before: Registration) -> None:
        self.n_runs += 1
        model = pycolmap.Reconstruction()
        lens = pycolmap.Camera.create_from_model_name(1, "SIMPLE_PINHOLE", 10.0, 8, 6)
        model.add_camera_with_trivial_rig(lens)
        for number in range(1, before.models.n_registered + 2):
            image = pycolmap.Image(name=capture.names[number - 1], camera_id=1, image_id=number)
            model.add_image_with_trivial_frame(image, pycolmap.Rigid3d())
        write_model(model, self.folder(capture) / "0")


def make_capture(root: Path) -> Capture:
    """Write the images to a scene folder, which is made."""
    folder = root / "input"
    folder.mkdir(parents=True)
    for number in range(N_IMAGES):
        Image.new("RGB", (8, 6), (number, 0, 0)).save(folder / f"{number}.png")
    source = find_source(root)
    source.work.mkdir()
    work = Work(source, ConvertOptions(root), Heard())
    photographs = described_photographs(folder, False, lambda line: None)
    lenses = [None] * N_IMAGES
    return Capture(work, photographs, lenses, content="photographs", masked_content="masks")
