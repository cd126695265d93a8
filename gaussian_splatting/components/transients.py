# SPDX-License-Identifier: Apache-2.0
"""Transient masks as a component: moving or occluding things are excluded from training.

People who walk through, cars, shadows of who photographs: :mod:`.transient_regions` finds them
while the model is young, before Gaussians are added for them, and again a few times as it improves.
Their pixels have weight 0 from then on, as those of a mask in mode ``ignore``.
"""

from __future__ import annotations

import shutil
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from gaussian_splatting.components.transient_regions import SIDE, Masks, find_transients
from gaussian_splatting.components.view_residuals import ComparedView, compared
from gaussian_splatting.core.cloud import Gaussians
from gaussian_splatting.data.cameras import Camera
from gaussian_splatting.data.images import decode_mask
from gaussian_splatting.data.masks import write_object_mask
from gaussian_splatting.engine.component import (
    Component,
    ComponentReport,
    ExportTarget,
    Figure,
    IterationContext,
)
from gaussian_splatting.engine.state_schema import ANY, StateRule
from gaussian_splatting.engine.training_views import TrainingView, without_uncovered
from gaussian_splatting.engine.view_sampling import smaller
from gaussian_splatting.scenes.reference_layout import TRANSIENT_MASKS
from sugar_utils.device import float32_tensor, upload
from sugar_utils.flags import boolean
from sugar_utils.settings import flag

SHARE_CURVE = "Transients/share of the pixels"  # in TensorBoard, and in the report
KEY = "transient pixels of "  # of a view, in checkpoints
MIN_VIEWS = 8  # with fewer, a place has no usual residual
FIRST = 500  # iteration of the first search, where densification does not begin later
FIRST_SHARE = 0.15  # of the iterations of a short run, until the first search
LAST_SHARE = 0.65  # of the iterations, after which nothing is searched any more


@dataclass(frozen=True)
class TransientConfig:
    """Whether transient regions are looked for."""

    transients: bool = flag(
        False,
        "find regions that contradict all other photographs, such as people who walk through and "
        "shadows, and exclude them from training and texture; not in photographs with masks of an "
        "object; unset: on with --preset fast",
        group="vanilla stage",
        parse=boolean,
        nargs="?",
        const=True,
        no_effect_when="with --gs_output_dir",
        modes={"fast": True},
    )

    def identity(self) -> dict[str, Any]:
        """Return the settings that decide a result; empty where nothing is looked for."""
        return {"transients": asdict(self)} if self.transients else {}


NO_TRANSIENTS = TransientConfig()


def search_iterations(iterations: int, densified_from: int, n_views: int) -> frozenset[int]:
    """Iterations after which transient regions are looked for: the first, and its doubles.

    Each search renders all views, so it waits until the model has been trained on as many. A run
    that is so short that most views are visited once has none.
    """
    at = min(max(densified_from, round(FIRST_SHARE * iterations)), FIRST)
    at = max(at, densified_from, n_views, 1)
    chosen = []
    while at <= LAST_SHARE * iterations:
        chosen.append(at)
        at *= 2
    return frozenset(chosen)


class Transients(Component):
    """Masks of transient regions, small ones, of the photographs that have some.

    Args:
        searches: Iterations after which they are looked for.
        sh_degree: Of the colours of renders.
    """

    name = "transients"
    schema = (StateRule(KEY, (ANY, ANY), not_negative=True),)

    def __init__(self, searches: Collection[int], sh_degree: int, n_views: int) -> None:
        self._searches = frozenset(searches)
        self._sh_degree = sh_degree
        self._n_views = n_views
        self.masks: Masks = {}

    def before_view(self, view: TrainingView) -> TrainingView:
        """Give transient pixels of the photograph weight 0."""
        if view.photograph is None or view.camera.name not in self.masks:
            return view
        photograph = view.photograph
        size = (photograph.shape[0], photograph.shape[1])
        enlarged_mask = enlarged(self.masks[view.camera.name], size)
        is_transient = upload(enlarged_mask, photograph.device)
        return replace(view, photograph=without_uncovered(photograph, ~is_transient))

    def looks_at(self, iteration: int) -> bool:
        """Whether a search is due."""
        return iteration in self._searches

    def after_iteration(self, context: IterationContext) -> None:
        """Look for transient regions; all processes find the same."""
        cameras = [camera for camera in context.cameras if not camera.shows_object]
        if len(cameras) < MIN_VIEWS:
            return
        originals = {camera.name: camera for camera in cameras}

        def compare(gaussians: Gaussians, camera: Camera) -> ComparedView:
            photograph = context.load_photograph(originals[camera.name])
            small, copy = smaller(camera, photograph, SIDE)
            white = context.white_background
            return compared(gaussians, small, copy, white=white, sh_degree=self._sh_degree)

        stage = context.stage
        posed = [stage.calibrated(camera) for camera in cameras]
        masks = find_transients(stage.gaussians(), posed, compare, self.masks)
        self.masks = context.group.broadcast(dict(masks))
        line = self.report().summary
        if line is not None:
            context.console.info(f"iteration {context.iteration}: {line}")

    def report(self) -> ComponentReport:
        """Return a line about the share of photographs that is excluded; empty where none is."""
        if not self.masks:
            return ComponentReport()
        name, most = max(self.masks.items(), key=lambda item: (item[1].mean(), item[0]))
        line = (
            f"left out what moved or stood in front in {len(self.masks)} of {self._n_views} "
            f"photographs: {self._share():.1%} of all pixels, most in {name} ({most.mean():.0%})"
        )
        return ComponentReport((Figure(SHARE_CURVE, self._share()),), line)

    def state(self) -> dict[str, Tensor]:
        """The masks by photograph, 1 where it is transient. (h, w) float16"""
        entries = {}
        for name, mask in self.masks.items():
            entries[f"{KEY}{name}"] = torch.from_numpy(mask.astype(np.float16))
        return entries

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Take :meth:`state` back."""
        masks = {}
        for key, values in state.items():
            if key.startswith(KEY):
                masks[key[len(KEY) :]] = values.cpu().numpy() > 0
        self.masks = masks

    def export(self, target: ExportTarget) -> None:
        """Write the masks in place of those of an earlier export."""
        folder = target.folder / TRANSIENT_MASKS
        shutil.rmtree(folder, ignore_errors=True)
        self.write(folder, target.scene.train_cameras)

    def write(self, folder: Path, cameras: Sequence[Camera]) -> None:
        """Write masks of photographs, black where nothing counts, at the size of the cameras.

        What masks of the capture leave out is black in them as well.
        """
        for camera in cameras:
            if camera.name not in self.masks:
                continue
            is_transient = enlarged(self.masks[camera.name], camera.shape)
            values = np.where(is_transient.numpy(), 0, 255).astype(np.uint8)
            if camera.mask is not None:
                capture_mask = decode_mask(camera.mask, *camera.size)
                values = np.minimum(values, capture_mask)
            write_object_mask(folder, camera.name, values)

    def _share(self) -> float:
        return float(sum(mask.mean() for mask in self.masks.values())) / max(1, self._n_views)


def enlarged(mask: np.ndarray, size: tuple[int, int]) -> Tensor:
    """A small mask at the height and width of an image, with smooth outlines. (h, w) -> (H, W)"""
    values = float32_tensor(mask)[None, None]
    return functional.interpolate(values, size, mode="bilinear", align_corners=False)[0, 0] >= 0.5
