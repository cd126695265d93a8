# SPDX-License-Identifier: Apache-2.0
"""Choosing how to save memory: the least slowdown that fits a budget, before training begins.

:func:`predict` estimates the peak of a step; a step that needs more all the same is repeated with
:func:`cheaper`. All phases of a stage share one plan; what is left of the budget goes to images.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from gaussian_splatting.core.color_gradients import MIN_FACTORED
from gaussian_splatting.core.subsets import about
from gaussian_splatting.data.cameras import Camera
from gaussian_splatting.engine.strips import WHOLE_IMAGE, ImageSplit
from gaussian_splatting.losses.photometric import SSIM_HALO
from gaussian_splatting.optim.optimizer_config import STATE_FORMATS, OptimizerConfig
from gaussian_splatting.rasterization import Projection
from gaussian_splatting.shared_flags import optional_boolean
from sugar_utils.errors import UserError
from sugar_utils.flags import positive_float, positive_int
from sugar_utils.memory import available_bytes, format_bytes
from sugar_utils.settings import flag
from sugar_utils.torchrun import Launch

MAX_STRIPS = 32
MIN_CHUNK = 50_000
STRIPS = 4
SURVEYED_VIEWS = 4
N_RECORDINGS = 2  # of passes that are held at a time
MIN_IMAGES = 2  # the one that is trained on and the next one
SH_ON_HOST_CHOICES = ("auto", "True", "False")
_FREE_SHARE = 0.8  # of free memory; the rest is for what is not in tensors, and other programs

Geometry = Literal["none", "full", "half", "depth", "planes"]
"""Maps that a step renders beside colour: none; depth and normals in the same pass; the same in a
pass of their own at half the size; depth only; planes, which are compared with a neighbouring
view."""

_CHANNELS = {"none": 3, "full": 6, "half": 3, "depth": 4, "planes": 7}
# Of a pixel, for the losses that are evaluated on it; SSIM keeps five maps of three channels.
_LOSS_BYTES = 84
# Of a pixel: colours; with mask and on the background; with both images once more as floats.
_IMAGE_BYTES = {"": 3, "object": 7, "ignore": 29}
# Of a Gaussian, beside channels: projection, its gradients, and those that other terms left.
_GAUSSIAN_BYTES = 228
_LATE_BYTES = 4  # of a Gaussian whose bands lie on the host: how many steps it has made
HELD_BYTES = 80  # of a Gaussian: gradients, those of colours as factors, radii and centres
_LASTING_PARTS = ("parameters", "moments", "neighbors", "mesh", "image")
_SAMPLING_BYTES = 292  # of a Gaussian while fields are evaluated at samples


@dataclass(frozen=True)
class ViewLoad:
    """Counts that set the cost of a view: pixels, visible Gaussians, tile intersections."""

    width: int
    height: int
    visible: int
    intersections: int
    mask: str = ""

    @classmethod
    def of(cls, projection: Projection) -> ViewLoad:
        """Count pixels, visible Gaussians and tile intersections of a projected view."""
        camera = projection.camera
        n_visible = int((projection.radii > 0).sum())
        n_intersections = int(projection.tile_counts.sum())
        mask = "" if camera.mask is None else camera.mask.mode
        return cls(camera.width, camera.height, n_visible, n_intersections, mask)

    def grown(self, factor: float) -> ViewLoad:
        """Return the load with so many times the Gaussians, each as large as now."""
        return replace(
            self,
            visible=math.ceil(factor * self.visible),
            intersections=math.ceil(factor * self.intersections),
        )


@dataclass(frozen=True)
class ModelLoad:
    """Bytes of parameters and moments, and of the gradients of colour bands 1 to 3."""

    parameters: int  # on the device
    moments: int  # on the device
    band_gradients: int = 0
    host: int = 0  # parameters and moments that lie on the host

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor], config: OptimizerConfig) -> ModelLoad:
        """Of parameters by name, stored as ``config`` says."""
        parameters = 0
        moments = 0
        host = 0
        for name, tensor in tensors.items():
            value_bytes = tensor.numel() * config.value_dtype(name).itemsize
            moment_bytes = 2 * tensor.numel() * config.moment_dtype(name).itemsize
            if config.lies_on_host(name, tensors):
                host += value_bytes + moment_bytes
                moments += _LATE_BYTES * len(tensor)
            else:
                parameters += value_bytes
                moments += moment_bytes
        bands = {name: t for name, t in tensors.items() if name.endswith("sh_rest")}
        # Gaussians that are joined with those of a background leave whole gradients.
        is_alone = len(bands) == 1 and config.views_per_step == 1
        if is_alone and all(len(t) >= MIN_FACTORED for t in bands.values()):
            return cls(parameters, moments, host=host)
        gradients = sum(t.numel() * config.value_dtype(name).itemsize for name, t in bands.items())
        return cls(parameters, moments, gradients, host)


@dataclass(frozen=True)
class StepLoad:
    """Inputs of a step that set its memory."""

    n: int  # Gaussians
    model: ModelLoad
    view: ViewLoad
    geometry: Geometry = "none"
    activation: int = 0  # bytes of activated Gaussians
    samples: int = 0
    sampled_room: float = 1.0  # Gaussians that samples have room for, over those of the view
    features: int = 0  # free channels
    neighbors: int = 0  # neighbours of each Gaussian; 0 where none are needed
    pair_bytes: int = 64 * 2**20  # bytes of gradients to neighbours that are sorted at once
    fixed: int = 0  # bytes of a mesh


@dataclass(frozen=True)
class MemoryPlan:
    """Measures of a step that save memory; the result depends on them by rounding only."""

    split: ImageSplit = WHOLE_IMAGE
    sample_chunk: int | None = None  # samples evaluated at once; None for all
    # Whether passes may be recorded, which takes memory of its own.
    records: bool = True


def predict(load: StepLoad, plan: MemoryPlan) -> dict[str, int]:
    """Estimated bytes of tensors at the peak of a step, by purpose.

    The peak is while samples are evaluated, or while it goes backward through an image.
    """
    n = load.n
    view = load.view
    geometry = load.geometry
    channels = _CHANNELS[geometry] + load.features
    compared = 17 if geometry == "planes" else 0
    rows = min(view.height, -(-view.height // plan.split.strips) + 2 * SSIM_HALO)
    # Splats are not spread evenly over the strips.
    share = 1.0 if plan.split.strips == 1 else min(1.0, 1.5 * rows / view.height)
    pixels = rows * view.width
    blended = pixels * (4 * channels + 8)
    image = {
        "Gaussians": (_GAUSSIAN_BYTES + 8 * channels) * n,
        "tile intersections": 8 * view.intersections,
        "pixels": blended,
        "backward": max(
            pixels * _LOSS_BYTES,
            round(share * view.intersections) * (24 + 4 * channels) + 4 * channels * pixels,
            20 * n + load.model.band_gradients - blended - 8 * view.intersections,
        ),
    }
    chunk = min(plan.sample_chunk or load.samples, load.samples)
    candidates = round(load.sampled_room * view.visible)
    owners = min(chunk, candidates * chunk // max(load.samples, 1))
    sampling = {
        "Gaussians": _SAMPLING_BYTES * n,
        "pixels": (32 if geometry == "depth" else 0) * view.width * view.height,
        "samples": 52 * load.samples + (140 if geometry == "depth" else 96) * chunk,
        # With the copies that sorting their targets takes.
        "neighbor gradients": round(1.6 * min(load.pair_bytes, owners * (load.neighbors + 1) * 44)),
    }
    steps = [image, sampling] if load.samples else [image]
    parts = {
        "parameters": load.model.parameters,
        "moments": load.model.moments,
        "neighbors": 4 * load.neighbors * n,
        "mesh": load.fixed,
        "image": (_IMAGE_BYTES[view.mask] + compared) * view.width * view.height,
        "activation": load.activation,
        **max(steps, key=lambda step: sum(step.values())),
    }
    return {name: size for name, size in parts.items() if size}


def predicted_bytes(load: StepLoad, plan: MemoryPlan) -> int:
    """Estimated bytes of tensors at the peak of a step."""
    return sum(predict(load, plan).values())


def recording_bytes(load: StepLoad, plan: MemoryPlan) -> int:
    """Estimated bytes that recorded passes of a phase hold while others are launched.

    They share what a pass needs for a while, and hold their gradients and radii: a recording of
    each kind of passes, with the step and without.
    """
    parts = predict(load, plan)
    passing = sum(size for name, size in parts.items() if name not in _LASTING_PARTS)
    held = HELD_BYTES * load.n + load.model.band_gradients
    return passing + N_RECORDINGS * held


LoadsOf = Callable[[OptimizerConfig], Mapping[str, StepLoad]]
"""Step of each phase with an optimiser's formats."""


@dataclass(frozen=True)
class MemoryOptions:
    """Flags about memory; they change the result by rounding only."""

    vram_budget: float | None = flag(
        None,
        "GiB for tensors on the training device, and on the CPU for photographs as well; "
        "unset: four fifths of what is free there. Strips, chunks of samples and the photographs "
        "in memory follow from it, in vanilla training the last alone",
        group="memory",
        parse=positive_float,
        task="time and memory",
    )
    gradient_accumulation: bool | None = optional_boolean(
        None,
        "work on one image in horizontal strips, which bounds the memory of pixels; the "
        "gradient is that of the whole image; unset: as --vram_budget needs it",
    )
    accumulation_steps: int | None = flag(
        None,
        f"number of strips, {STRIPS} when unset; at most one per image row",
        group="memory",
        parse=positive_int,
        no_effect_when="without --gradient_accumulation True; it says so",
    )
    sh_on_host: str = flag(
        "auto",
        "keep colour bands 1 to 3 and their moments, three quarters of what a Gaussian takes, in "
        "page-locked memory of the host; the GPU reads what is in view. auto: where they do not "
        "fit on the GPU, in vanilla training never; the result is the same to the bit",
        group="memory",
        choices=SH_ON_HOST_CHOICES,
        no_effect_when="on the CPU; it says so",
    )
    use_gradient_checkpointing: bool | None = optional_boolean(
        None,
        "accepted without effect: the graph of each term is freed at once, so checkpointing "
        "saves next to nothing",
        no_effect_when="always; True says so",
    )
    # Processes that train together; with several views per step each keeps one more copy of the
    # gradients.
    processes: int = field(default_factory=lambda: Launch.read().size)
    # Of these, those that share the memory of this machine.
    sharers: int = field(default_factory=lambda: Launch.read().local_size)

    @property
    def budget(self) -> int | None:
        """Bytes for tensors and images; None for the free memory."""
        return None if self.vram_budget is None else round(self.vram_budget * 2**30)

    @property
    def split(self) -> ImageSplit:
        """Strips to begin with."""
        if not self.gradient_accumulation:
            return ImageSplit(1)
        return ImageSplit(self.accumulation_steps or STRIPS)

    @property
    def fixed_split(self) -> bool:
        """Whether the flags name the strips, so that no plan may change them."""
        return self.gradient_accumulation is not None

    def places_of_bands(self, device: torch.device) -> tuple[bool, ...]:
        """Whether colour bands may lie on the host of a device: the choices, the best one first."""
        if device.type == "cpu" or self.sh_on_host == "False":
            return (False,)
        return (True,) if self.sh_on_host == "True" else (False, True)

    def keeps_bands_on_host(self, device: torch.device) -> bool:
        """Whether colour bands lie on the host where no plan decides."""
        return self.places_of_bands(device)[0]

    def messages(self, device: torch.device) -> tuple[str, ...]:
        """One line for each flag that was given but has no effect."""
        lines = []
        if self.sh_on_host == "True" and device.type == "cpu":
            lines.append("--sh_on_host True has no effect on the CPU, whose memory is the host's")
        if self.accumulation_steps is not None and not self.gradient_accumulation:
            lines.append("--accumulation_steps has no effect without --gradient_accumulation True")
        if self.use_gradient_checkpointing:
            lines.append("--use_gradient_checkpointing has no effect: graphs are freed at once")
        return tuple(lines)


def peak_of(phases: Mapping[str, Mapping[str, int]]) -> int:
    """Return the bytes at the peak of the phase that needs most."""
    return max(sum(parts.values()) for parts in phases.values())


@dataclass(frozen=True)
class MemoryChoice:
    """A plan that fits, with its predicted bytes."""

    plan: MemoryPlan
    phases: dict[str, dict[str, int]]  # bytes at the peak of each phase, by what they are for
    budget: int  # bytes
    image_bytes: int  # of the budget for images; 0 where those lie in other memory
    host_bytes: int = 0  # of colour bands that lie on the host
    recording_bytes: int = 0  # that recorded passes would hold; 0 where none are

    @property
    def peak(self) -> int:
        """Bytes at the peak of the phase that needs most."""
        return peak_of(self.phases)

    def lines(self) -> list[str]:
        """Lines for the log."""
        images = "photographs stay in the memory of the host"
        if self.image_bytes:
            images = f"{format_bytes(self.image_bytes)} of it for photographs"
        room = format_bytes(self.budget)
        lines = [f"memory plan: {describe(self.plan)}; {room} to use, {images}"]
        if self.host_bytes:
            lines.append(
                f"colour bands 1 to 3 lie on the host: {format_bytes(self.host_bytes)} there"
            )
        if self.recording_bytes:
            size = format_bytes(self.recording_bytes)
            fits = "kept for" if self.plan.records else "not there, so there are no"
            lines.append(f"{size} are {fits} recorded passes")
        for phase, needs in self.phases.items():
            parts = sorted(needs.items(), key=lambda part: -part[1])
            named = ", ".join(f"{name} {format_bytes(n)}" for name, n in parts)
            total = format_bytes(sum(needs.values()))
            lines.append(f"memory of {phase}: about {total} at most: {named}")
        return lines


def describe(plan: MemoryPlan) -> str:
    """A plan in words."""
    strips = plan.split.strips
    words = ["whole images" if strips == 1 else f"images in {strips} strips"]
    if plan.sample_chunk is not None:
        words.append(f"{plan.sample_chunk:,} samples at once")
    return ", ".join(words)


def cheaper(plan: MemoryPlan, fixed_split: bool = False) -> MemoryPlan | None:
    """The next plan that needs less memory, all that can be smaller at once; None at the end."""
    strips = plan.split.strips
    chunk = plan.sample_chunk
    if not fixed_split:
        strips = min(2 * strips, max(MAX_STRIPS, strips))
    if chunk is not None and chunk > MIN_CHUNK:
        chunk = max(MIN_CHUNK, chunk // 2)
    smaller = replace(plan, split=ImageSplit(strips), sample_chunk=chunk)
    return None if smaller == plan else smaller


def surveyed(cameras: Sequence[Camera]) -> list[Camera]:
    """Some evenly spaced views, and before them the one with the largest image."""
    largest = max(cameras, key=lambda camera: camera.n_pixels)
    return [largest, *about(cameras, SURVEYED_VIEWS)]


def worst_view(load: StepLoad, views: Sequence[ViewLoad]) -> StepLoad:
    """The step on the view that needs most."""
    loads = [replace(load, view=view) for view in views]
    return max(loads, key=lambda one: predicted_bytes(one, MemoryPlan()))


def usable_bytes(options: MemoryOptions, device: torch.device, held: int) -> int | None:
    """Usable bytes on the device, or None if unknown.

    Args:
        held: Bytes that are in use now and will be let go.
    """
    if options.budget is not None:
        return options.budget
    available = available_bytes(device)
    if available is None:
        return None
    if device.type == "cpu":
        available //= options.sharers
    return int(_FREE_SHARE * (available + held))


def choose(
    loads_of: LoadsOf,
    optimizer: OptimizerConfig,
    first: MemoryPlan,
    options: MemoryOptions,
    budget: int,
    image_sizes: Sequence[int],
    *,
    records: bool = False,
) -> MemoryChoice:
    """Choose the first plan of :func:`cheaper` that fits the budget.

    Recorded passes get what is left over, or are done without.

    Args:
        loads_of: Steps of all phases with an optimiser's formats.
        first: Plan to begin with.
        budget: Bytes for tensors, and for images if there are sizes.
        image_sizes: Bytes of each image; empty where images lie in other memory.
        records: Whether passes are to be recorded.

    Raises:
        UserError: No plan fits; the message says which flags would help.
    """
    loads = loads_of(optimizer)
    least_images = MIN_IMAGES * max(image_sizes, default=0)
    for plan in _plans(first, options):
        phases = {name: predict(load, plan) for name, load in loads.items()}
        peak = peak_of(phases)
        left_over = budget - peak
        if left_over >= least_images:
            host_bytes = max(load.model.host for load in loads.values())
            recordings = 0
            if records:
                recordings = max(recording_bytes(load, plan) for load in loads.values())
                plan = replace(plan, records=recordings <= left_over)
                left_over -= recordings if plan.records else 0
            image_bytes = min(sum(image_sizes), left_over)
            return MemoryChoice(plan, phases, budget, image_bytes, host_bytes, recordings)

    def needed(config: OptimizerConfig, options: MemoryOptions) -> int:
        loads = loads_of(config).values()
        peaks = []
        for plan in _plans(first, options):
            peaks.append(max(predicted_bytes(load, plan) for load in loads))
        return least_images + min(peaks)

    raise UserError(_what_would_fit(optimizer, options, budget, needed))


def _what_would_fit(
    optimizer: OptimizerConfig,
    options: MemoryOptions,
    budget: int,
    needed: Callable[[OptimizerConfig, MemoryOptions], int],
) -> str:
    """The message of a budget that is too small, with the mildest flags that help."""
    start = (
        f"training needs {format_bytes(needed(optimizer, options))} at least, the budget is "
        f"{format_bytes(budget)} (--vram_budget)"
    )
    any_strips = replace(options, gradient_accumulation=None)
    if options.fixed_split and needed(optimizer, any_strips) <= budget:
        return f"{start}; it fits without --gradient_accumulation"
    formats = STATE_FORMATS[STATE_FORMATS.index(optimizer.optimizer_state) :]
    for state_format in formats:
        for use_bfloat16 in (optimizer.use_bfloat16, True):
            config = replace(optimizer, optimizer_state=state_format, use_bfloat16=use_bfloat16)
            if needed(config, any_strips) <= budget:
                flags = f"--optimizer_state {state_format}"
                flags += " --use_bfloat16 True" * use_bfloat16
                return f"{start}; it fits with {flags}"
    smallest = replace(optimizer, optimizer_state=formats[-1], use_bfloat16=True)
    return (
        f"{start}; even --optimizer_state bf16 --use_bfloat16 True needs "
        f"{format_bytes(needed(smallest, any_strips))}: give that much, smaller images or fewer "
        "Gaussians"
    )


def _plans(first: MemoryPlan, options: MemoryOptions) -> list[MemoryPlan]:
    plans = [first]
    while (plan := cheaper(plans[-1], options.fixed_split)) is not None:
        plans.append(plan)
    return plans
