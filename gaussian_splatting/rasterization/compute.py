# SPDX-License-Identifier: Apache-2.0
"""Device and rasterizer of a run, and their flags."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from gaussian_splatting.rasterization import WARP, Rasterizer
from gaussian_splatting.rasterization.backends import RASTERIZERS, choose_rasterizer
from sugar_utils.device import DEVICE_KINDS, choose_device, cuda_facts, make_current
from sugar_utils.errors import Notify, UserError
from sugar_utils.flags import integer
from sugar_utils.process_group import ALONE, ProcessGroup
from sugar_utils.settings import flag
from sugar_utils.torchrun import Launch

CUDA_GRAPH_CHOICES = ("auto", "off")


@dataclass(frozen=True)
class Compute:
    """Device and rasterizer of a run; not in its identity, so runs may move between machines."""

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    rasterizer: Rasterizer = WARP
    device_reason: str = field(default="", compare=False)
    rasterizer_reason: str = field(default="", compare=False)
    group: ProcessGroup = field(default=ALONE, compare=False)
    # Whether passes over views may be recorded as CUDA graphs; nothing is on a CPU.
    cuda_graph: bool = field(default=True, compare=False)

    def report(self, notify: Notify) -> None:
        """Report why the device was chosen, where flags chose it."""
        if self.device_reason:
            notify(self.device_reason)

    @property
    def notes(self) -> tuple[str, ...]:
        """Lines about the device and the processes that a user should read."""
        together = ""
        if not self.group.is_alone:
            together = f"{self.group.size} processes share the views of each step"
        return tuple(filter(None, (self.device_reason, together)))


@dataclass(frozen=True)
class DeviceFlags:
    """Flags of programs that compute in one process."""

    device: str = flag(
        "auto",
        "auto: a CUDA GPU of compute capability 7.5 or newer if torch and Warp can use "
        "one, else the CPU; the choice is printed with its reason. cuda: an error that names what "
        "is missing, and what helps, where there is none",
        group="device",
        choices=DEVICE_KINDS,
        task="time and memory",
    )
    gpu: int | None = flag(
        None,
        "number of the CUDA device; unset: the first that can be used",
        group="device",
        parse=integer,
        no_effect_when="on the CPU; it says so",
        task="time and memory",
    )

    @classmethod
    def from_flags(cls, **flags: Any) -> Compute:
        """Choose by the values of the flags."""
        return cls(**flags).choose()

    def choose(self) -> Compute:
        """Choose the device.

        Raises:
            UserError: It cannot be used, or torchrun started several processes.
        """
        if Launch.read().size > 1:
            raise UserError("this script works in one process: start it without torchrun")
        chosen = choose_device(self.device, self.gpu)
        make_current(chosen.device)
        return Compute(chosen.device, device_reason=chosen.reason)


@dataclass(frozen=True)
class BackendFlags(DeviceFlags):
    """Flags of programs that train, in one or more processes."""

    rasterizer: str = flag(
        "auto",
        "rendering backend. auto and warp: the built-in rasterizer, the same bits on every "
        "run; gsplat (1.5 or newer) and inria (diff_gaussian_rasterization): that package, if it "
        "is installed and passes a self-test at the start, on CUDA devices only",
        group="backends",
        choices=RASTERIZERS,
    )

    cuda_graph: str = flag(
        "auto",
        "record a training step on a GPU once as a CUDA graph, and replay it, so the GPU does not "
        "wait for the host. auto: with the built-in rasterizer, if a check in a process of its own "
        "has passed and the bits are the same; off: "
        "launch every kernel",
        group="backends",
        choices=CUDA_GRAPH_CHOICES,
        no_effect_when="on the CPU",
    )

    def choose(self) -> Compute:
        """The device and the rasterizer; processes that torchrun started meet here."""
        launch = Launch.read()
        group = ProcessGroup.join(launch, cuda=self.device != "cpu" and torch.cuda.is_available())
        with group.single_report():
            chosen = choose_device(self.device, _number_of_gpu(self.gpu, launch))
            make_current(chosen.device)
            rasterizer, reason = choose_rasterizer(self.rasterizer, chosen.device)
        return Compute(
            chosen.device,
            rasterizer,
            chosen.reason,
            reason,
            group,
            cuda_graph=self.cuda_graph == "auto",
        )


def _number_of_gpu(asked: int | None, launch: Launch) -> int | None:
    """The GPU of this process: what the user asked for; of several processes each has its own."""
    if launch.size == 1:
        return asked
    if asked is not None:
        raise UserError(
            f"--gpu {asked}: each of the {launch.size} processes takes the GPU of its own number; "
            "choose GPUs with CUDA_VISIBLE_DEVICES"
        )
    return launch.local_rank if cuda_facts().gpus else None
