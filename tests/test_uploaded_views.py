# SPDX-License-Identifier: Apache-2.0
"""Photographs that are sent to a GPU ahead of the step that reads them; the GPU is a stand-in."""

from __future__ import annotations

from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch

from gaussian_splatting.engine import view_sampling
from gaussian_splatting.engine.stepping import Stepper
from gaussian_splatting.engine.view_sampling import UploadedViews
from sugar_trainers.view_comparison import ViewComparer
from tests.support.recorded_training import STAGES, refine_stage, trained
from tests.support.step_scenes import MadeUpPhotographs
from tests.support.tiny_scene import tiny_cameras

GPU = torch.device("cuda")
BYTES = 10 * 2**20  # of a photograph on the stand-in


@pytest.fixture
def gpu(monkeypatch):
    """A GPU's streams and copies; each copy is an object of its own."""
    fake = SimpleNamespace(Stream=MagicMock(), stream=MagicMock(), current_stream=MagicMock())
    fake.Event = MagicMock()
    monkeypatch.setattr(view_sampling.torch, "cuda", fake)
    copies = MagicMock(side_effect=lambda tensor, device: MagicMock(nbytes=BYTES))
    monkeypatch.setattr(view_sampling, "upload", copies)
    return SimpleNamespace(cuda=fake, copies=copies)


def views_of(device):
    photographs = {}

    def photograph(camera):
        return photographs.setdefault(id(camera), torch.zeros(2, 2, 3, dtype=torch.uint8))

    return UploadedViews(MadeUpPhotographs(photograph), device)


def test_a_photograph_sent_ahead_is_copied_once_and_awaited(gpu):
    views = views_of(GPU)
    camera = tiny_cameras(1)[0]
    views.send_ahead(camera, 1.0)
    event = gpu.cuda.Event.return_value
    event.record.assert_called_once_with(gpu.cuda.Stream.return_value)
    gpu.cuda.stream.assert_called_once_with(gpu.cuda.Stream.return_value)
    sized, photograph = views.get(camera, 1.0)
    assert sized is camera
    assert gpu.copies.call_count == 1
    current = gpu.cuda.current_stream.return_value
    current.wait_event.assert_called_once_with(event)
    photograph.record_stream.assert_called_once_with(current)


@pytest.mark.parametrize("changed", ["camera", "nothing sent"])
def test_another_view_is_copied_when_it_is_asked_for(gpu, changed):
    views = views_of(GPU)
    asked = tiny_cameras(1)[0]
    if changed == "camera":
        views.send_ahead(tiny_cameras(1)[0], 1.0)
    n_before = gpu.copies.call_count
    sized, _ = views.get(asked, 1.0)
    assert sized is asked
    assert gpu.copies.call_count == n_before + 1
    gpu.cuda.current_stream.return_value.wait_event.assert_not_called()
    # What was sent for nothing is not used later either.
    views.get(tiny_cameras(1)[0], 1.0)
    assert gpu.copies.call_count == n_before + 2


def test_photographs_that_fit_stay_on_the_gpu(gpu):
    views = views_of(GPU)
    cameras = tiny_cameras(5)
    for camera in cameras:
        views.send_ahead(camera, 1.0)
        views.get(camera, 1.0)
    assert gpu.copies.call_count == 5
    n_fitting = view_sampling.KEPT_BYTES // BYTES
    for camera in cameras[:n_fitting]:
        views.prefetch(camera)
        views.send_ahead(camera, 1.0)
        assert views.get(camera, 1.0)[0] is camera
    assert gpu.copies.call_count == 5
    for camera in cameras[n_fitting:]:
        views.get(camera, 1.0)
    assert gpu.copies.call_count == 10 - n_fitting


def test_photographs_of_another_size_are_sent_anew(gpu):
    images = SimpleNamespace(
        serve=lambda device: None,
        get=lambda camera: torch.zeros(8, 8, 3, dtype=torch.uint8),
        scaled=lambda camera, scale, make: torch.zeros(4, 4, 3, dtype=torch.uint8),
        drop_scaled=lambda scale: None,
    )
    views = UploadedViews(images, GPU)
    camera = tiny_cameras(1)[0]
    sizes = [views.get(camera, scale)[0].width for scale in (0.5, 0.5, 1.0, 1.0)]
    assert sizes[0] == sizes[1] < sizes[2] == sizes[3]
    assert gpu.copies.call_count == 2


def test_a_cpu_sends_nothing_ahead():
    views = views_of(torch.device("cpu"))
    camera = tiny_cameras(1)[0]
    views.send_ahead(camera, 1.0)
    sized, photograph = views.get(camera, 1.0)
    assert sized is camera
    assert photograph.shape == (2, 2, 3)


MULTIVIEW, MULTIVIEW_FIRST = STAGES["multiview"]


@pytest.mark.parametrize(
    ("build", "first"),
    [(MULTIVIEW, MULTIVIEW_FIRST), (lambda *how: refine_stage(*how, compared=True), 1)],
    ids=["multiview", "refine"],
)
def test_neighbours_of_the_next_view_are_read_and_sent_ahead(build, first, monkeypatch):
    events = []

    def watch(name):
        original = getattr(UploadedViews, name)

        def watched(views, camera, *scale):
            if views is not stepper_views[-1]:
                events.append((name, camera.name))
            return original(views, camera, *scale)

        monkeypatch.setattr(UploadedViews, name, watched)

    stepper_views = []
    begin = Stepper.__init__

    def noted(stepper, *inputs, **how):
        begin(stepper, *inputs, **how)
        stepper_views.append(stepper._views)

    monkeypatch.setattr(Stepper, "__init__", noted)
    for name in ("prefetch", "get", "send_ahead"):
        watch(name)
    trained(None, build=build, first=first, steps=6)
    names = [name for name, _ in events]
    assert names == ["prefetch", "get", "send_ahead"] * 6
    prefetched, got, sent = (events[i::3] for i in range(3))
    cameras_got = [camera for _, camera in got][1:]
    assert cameras_got == [camera for _, camera in sent][:-1]
    assert cameras_got == [camera for _, camera in prefetched][:-1]


def test_a_comparer_sends_what_it_will_ask_for(gpu):
    cameras = tiny_cameras(6)
    rule = SimpleNamespace(n_pixels=10, seed=3, first=0)
    beside = {camera.name: cameras[i - 1] for i, camera in enumerate(cameras)}
    neighbors = SimpleNamespace(draw=lambda name, seed, iteration, index: beside[name])
    images = MadeUpPhotographs(lambda camera: torch.zeros(2, 2, 3, dtype=torch.uint8))
    comparer = ViewComparer(neighbors, images, 1.0, rule, device=GPU)
    comparer.send_ahead(cameras[2], 5, 0)
    assert gpu.copies.call_count == 1
    camera, _ = comparer._views.get(cameras[1], 1.0)
    assert camera is cameras[1]
    assert gpu.copies.call_count == 1
