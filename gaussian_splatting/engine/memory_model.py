# SPDX-License-Identifier: Apache-2.0
"""How many bytes of tensors a training step holds at most, predicted from its sizes.

A step is a sequence of moments (sampling, pixel losses of a strip, gradients of tiles, the way
back through the projection, ...). The bytes of each are the sum of what is alive then, counted in
the code that runs: the numbers below are bytes per Gaussian, pixel or sample of named tensors.
``benchmarks/memory.py`` measures the same; ``tests/test_memory_plan.py`` compares the two.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from torch import Tensor

from gaussian_splatting.engine.strips import WHOLE_IMAGE, ImageSplit
from gaussian_splatting.losses.photometric import SSIM_HALO
from gaussian_splatting.optim.optimizer_config import OptimizerConfig
from gaussian_splatting.rasterization import Projection, Rows, build_tile_lists
from gaussian_splatting.rasterization.pair_forecast import with_room
from gaussian_splatting.rasterization.view import TILE

Geometry = Literal["none", "full", "half", "depth", "planes"]
"""What a step renders beside colour: nothing; depth and normals with it; in a pass of their own at
half the size; depth only; planes, which are compared with a neighbouring view."""

FREE_ACTIVATION = 36
"""Scales, opacities, unit quaternions and their lengths."""

BOUND_ACTIVATION = (36, 44)
"""Gradients of a triangle's corners, and what is placed: centre, quaternion, scales, opacity."""

_SHAPE_GRADIENTS = 44
"""Gradients of centres, quaternions, scales and opacities."""
_PACKED = 64
_NORMAL_LOSS = 12
"""Depth-normal consistency of a pixel: gradients of depth and of a normal's x and y."""
_PLANE_NORMAL_LOSS = 142
"""Agreement of a pixel's plane with the depth of planes: rays, depth and the same."""

_COMPARED = 17
"""Of a pixel: grey values of the view and of its neighbour, the neighbour's depth, edge weights."""

_PHOTOGRAPH = {"": 3, "object": 7, "ignore": 5}
"""Bytes of a pixel: colours; with mask and once more on the background; with what counts."""

_COUNTED = 24
"""Both images of a pixel once more, with those equal that do not count."""

_DENSIFICATION = 12
"""What is watched of a Gaussian between two rounds, and whether it is seen."""

_SLOT_BYTES = 44


@dataclass(frozen=True)
class ViewLoad:
    """What a view costs.

    Attributes:
        width: In pixels.
        height: In pixels.
        pairs: (Tile, splat) pairs that are blended.
    """

    width: int
    height: int
    visible: int
    pairs: int
    pairs_per_tile_row: tuple[int, ...]
    mask: str = ""

    @classmethod
    def of(cls, projection: Projection) -> ViewLoad:
        """Of a projection."""
        camera, tiles = projection.camera, build_tile_lists(projection)
        n_pairs = tiles.ids.shape[0]
        on_gpu = projection.splats.device.type != "cpu"
        return cls(
            camera.width,
            camera.height,
            int((projection.radii > 0).sum()),
            with_room(n_pairs) if on_gpu else n_pairs,
            tuple(tiles.offsets[:: tiles.across].diff().tolist()),
            "" if camera.mask is None else camera.mask.mode,
        )

    def grown(self, factor: float) -> ViewLoad:
        """What the view costs with so many times the Gaussians, each as large as now."""
        return replace(
            self,
            visible=math.ceil(factor * self.visible),
            pairs=math.ceil(factor * self.pairs),
            pairs_per_tile_row=tuple(math.ceil(factor * n) for n in self.pairs_per_tile_row),
        )

    def halved(self) -> ViewLoad:
        """About what the view costs at half the size: splats reach half as far over tiles."""
        height = max(1, self.height // 2)

        def shrunk(count: float) -> float:
            reach = math.sqrt(max(count / max(self.visible, 1), 1.0)) - 1.0
            return self.visible * (1.0 + reach / 2) ** 2 * min(count / max(self.visible, 1), 1.0)

        n_rows, pairs = -(-height // TILE), shrunk(sum(self.pairs_per_tile_row))
        return ViewLoad(
            max(1, self.width // 2),
            height,
            self.visible,
            round(shrunk(self.pairs)),
            (math.ceil(pairs / n_rows),) * n_rows,
        )

    def pairs_in(self, rows: Rows) -> int:
        """Pairs in the tiles that some rows touch."""
        return sum(self.pairs_per_tile_row[rows.start // TILE : -(-rows.stop // TILE)])


@dataclass(frozen=True)
class ModelLoad:
    """Bytes of what an optimiser keeps.

    Attributes:
        band_bytes: Bytes of a value of the colour bands 1 to 3.
    """

    parameters: int
    moments: int
    band_bytes: int = 4

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor], config: OptimizerConfig) -> ModelLoad:
        """Of parameters by name, stored as ``config`` says."""
        parameters = moments = 0
        for name, tensor in tensors.items():
            rows, width = tensor.shape[0], math.prod(tensor.shape[1:])
            parameters += rows * width * config.value_dtype(name).itemsize
            state = config.state_format(name, width)
            per_row = {"fp32": 8 * width, "bf16": 4 * width, "8bit": 2 * width + 4}[state]
            moments += rows * per_row
        return cls(parameters, moments, config.value_dtype("sh_rest").itemsize)


@dataclass(frozen=True)
class StepLoad:
    """What the step of a phase works on.

    Attributes:
        candidates: Gaussians that samples are drawn from; None for all that the view shows.
        neighbors: Neighbours of each Gaussian; 0 where none are needed.
        fixed: Bytes of what does not change, such as a mesh.
    """

    n: int
    model: ModelLoad
    view: ViewLoad
    geometry: Geometry = "none"
    activation: int = 0
    samples: int = 0
    candidates: int | None = None
    neighbors: int = 0
    pair_bytes: int = 64 * 2**20
    entropy: bool = False
    fixed: int = 0
    exposure: bool = False

    @property
    def sampled(self) -> int:
        """Gaussians that samples are drawn from."""
        return self.view.visible if self.candidates is None else self.candidates


@dataclass(frozen=True)
class MemoryPlan:
    """How a step saves memory; the result depends on it by rounding only.

    Attributes:
        sample_chunk: Samples evaluated at once; None for all.
    """

    split: ImageSplit = WHOLE_IMAGE
    sample_chunk: int | None = None


@dataclass(frozen=True)
class MemoryBreakdown:
    """Bytes of tensors when most are alive."""

    peak_at: str
    parts: dict[str, int] = field(default_factory=dict)

    @property
    def total(self) -> int:
        """All of them."""
        return sum(self.parts.values())


def predict(load: StepLoad, plan: MemoryPlan) -> MemoryBreakdown:
    """The most that a step holds, photograph included, other photographs not."""
    standing = {
        "parameters": load.model.parameters,
        "moments": load.model.moments,
        "neighbors": 4 * load.neighbors * load.n,
        "mesh": load.fixed,
        "photograph": _PHOTOGRAPH[load.view.mask] * load.view.width * load.view.height,
    }
    parts_of_step = {
        name: {**standing, **parts} for name, parts in _Step(load, plan).parts_of_step().items()
    }
    worst = max(parts_of_step, key=lambda name: sum(parts_of_step[name].values()))
    return MemoryBreakdown(worst, {name: n for name, n in parts_of_step[worst].items() if n})


class _Step:
    """The parts of one step, each the bytes beyond those that always stand."""

    def __init__(self, load: StepLoad, plan: MemoryPlan) -> None:
        self._load = load
        self._split = plan.split
        self._chunk = min(plan.sample_chunk or load.samples, load.samples)
        self._again = plan.split.recompute
        self._n_channels = {"full": 6, "depth": 4, "planes": 7}.get(load.geometry, 3)
        self._early = 4 * load.n if load.entropy else 0

    def parts_of_step(self) -> dict[str, dict[str, int]]:
        """By name."""
        load = self._load
        found = {}
        if load.neighbors:
            found["neighbour search"] = self._search()
        if load.geometry == "half":
            half, kept = load.view.halved(), self._waiting()
            passes = self._image("half-size ", half, 3, kept, normals=True, color=False)
            found.update(passes)
        if load.samples:
            found["drawing samples"] = self._drawing()
            found["sampling"] = self._sampling()
            self._early = _SHAPE_GRADIENTS * load.n
        base = {"activation": load.activation, "gradients": self._early}
        if load.geometry == "planes":
            base["compared view"] = _COMPARED * load.view.width * load.view.height
            base["densification"] = _DENSIFICATION * load.n
        normals = load.geometry in ("full", "planes")
        return {**found, **self._image("", load.view, self._n_channels, base, normals=normals)}

    def _waiting(self) -> dict[str, int]:
        """What other terms find: the activation, and the view's projection unless forgotten."""
        load = self._load
        projected = 4 * load.n if self._again else _projection(load.n, self._n_channels)
        parts = {"activation": load.activation, "projection": projected, "gradients": self._early}
        if load.geometry == "depth":
            pixels = load.view.width * load.view.height
            keeps = self._split.strips == 1 and not self._again
            parts["pixels"] = pixels * (8 + (4 * self._n_channels + 8 if keeps else 0))
            parts["tile lists"] = 0 if self._again else 8 * load.view.pairs + 4 * load.n
        return parts

    def _search(self) -> dict[str, int]:
        """Indices and distances of the search, the points in their tree; the old ones stand."""
        n, leaves = self._load.n, max(1, -(-self._load.n // 16))
        boxes = 2 * (1 << (leaves - 1).bit_length()) * 28
        return {"neighbour search": n * (8 * self._load.neighbors + 16) + boxes}

    def _drawing(self) -> dict[str, int]:
        """Draws, their order, offsets, and the candidates."""
        load, parts = self._load, self._waiting()
        return {**parts, "sampling": 52 * load.samples + 8 * load.sampled + load.n}

    def _sampling(self) -> dict[str, int]:
        """The way back through the fields, with its buffer of gradients per pair."""
        load, parts, c = self._load, self._waiting(), self._chunk
        share = c / load.samples
        drawn = max(1.0, load.sampled * share)
        owners = drawn * -math.expm1(-c / drawn)
        per_owner = (load.neighbors + 1) * _SLOT_BYTES
        at_once = min(owners, load.pair_bytes // per_owner)
        # Sorting: targets before and after, places, and torch's copies of the last two.
        sorting = at_once * (8 + (load.neighbors + 1) * (4 + 2 * (4 + 8)))
        chunk = c * (80 if load.geometry != "depth" else 140)
        own = 20 * load.samples + chunk + 16 * owners + at_once * per_owner + sorting
        gaussians = load.n * (_PACKED + _SHAPE_GRADIENTS)
        gradients = _SHAPE_GRADIENTS * load.n if c < load.samples else self._early
        return {**parts, "sampling": round(own) + gaussians, "gradients": gradients}

    def _image(
        self,
        prefix: str,
        view: ViewLoad,
        channels: int,
        base: Mapping[str, int],
        *,
        normals: bool,
        color: bool = True,
    ) -> dict[str, dict[str, int]]:
        """Moments of a pass over an image whose projection comes on top of ``base``."""
        n = self._load.n
        sums = _projection(n, channels) + n * (44 + 4 * channels)
        base = {**base, "projection": base.get("projection", 0) + sums}
        lists = (
            base.get("tile lists", 0)
            + 8 * view.pairs
            + 4 * n
            + 4 * len(view.pairs_per_tile_row) * (-(-view.width // TILE))
        )
        pixels, losses, pairs = self._strip(view, channels, normals=normals, color=color)
        new = (_SHAPE_GRADIENTS + 12 + 45 * self._load.model.band_bytes) * n
        # A GPU sorts depths, then twice as much as the pairs; the CPU does with less.
        sorting = lists + max(12 * view.pairs + 4 * n, 24 * n)
        return {
            prefix + "sorting into tiles": {**base, "tile lists": sorting},
            prefix + "pixel losses": {**base, "tile lists": lists, **pixels, **losses},
            prefix + "gradients of tiles": {
                **base,
                "tile lists": lists + pairs * (24 + 4 * channels),
                "pixels": pixels["pixels"] + (12 if self._again else 4) * pixels["pixels"]
                // (4 * channels + (0 if self._again else 8)),
            },
            prefix + "way back through the projection": {
                **base, "gradients": base.get("gradients", 0) + new,
            },
        }  # fmt: skip

    def _strip(
        self, view: ViewLoad, channels: int, *, normals: bool, color: bool
    ) -> tuple[dict[str, int], dict[str, int], int]:
        """Pixels, losses and pairs of the strips that have most."""
        halo = SSIM_HALO if color else 1
        strips = [rows.widened(halo, view.height) for rows in self._split.rows(view.height)]
        rows = max(stop - start for start, stop in strips)
        pixels, line = rows * view.width, (math.ceil(3 * view.width / 256) * 256 + 32) * 4
        counted = _COUNTED * view.width if view.mask == "ignore" else 0
        # Its gradient, and for exposures one more image of products.
        gradient = (24 if self._load.exposure else 12) * view.width
        ssim = rows * (5 * line + gradient + counted) if color else 0
        loss = _PLANE_NORMAL_LOSS if self._load.geometry == "planes" else _NORMAL_LOSS
        normal = pixels * (loss + (12 if color else 0)) if normals else 0
        return (
            {"pixels": pixels * (4 * channels + (0 if self._again else 8))},
            {"pixel losses": normal} if normal > ssim else {"SSIM": ssim},
            max(view.pairs_in(Rows(*strip)) for strip in strips),
        )


def _projection(n: int, channels: int) -> int:
    """Splats, centres, radii, depths, rectangles and counts of tiles."""
    return n * (36 + 4 * channels + 8 + 28)
