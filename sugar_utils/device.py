# SPDX-License-Identifier: Apache-2.0
"""Choose the device to compute on, and say how to fix it where a GPU cannot be used."""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sugar_utils import warp_launch
from sugar_utils.errors import UserError

DEVICE_KINDS = ("auto", "cpu", "cuda")
MIN_CAPABILITY = (7, 5)  # GeForce RTX 20 and GTX 16, Quadro RTX, T4

INSTALL_CUDA_TORCH = (
    'install the CUDA build of torch with the pip command that pytorch.org shows under "Get '
    'Started" for your system, then "pip install -r requirements-without-torch.txt", which keeps it'
)
INSTALL_DRIVER = "install the current driver from nvidia.com/drivers and restart"
# CUDA version that the pinned torch and Warp are built for, and its first driver.
MIN_DRIVER_CUDA = (13, 0)
MIN_DRIVER = "580"
_VERSION_BYTES = 80  # of the text of a driver's version, as its library asks for

# The newest Warp for such drivers: the fast tests pass with it, on a GPU it has not been run.
KEEP_DRIVER = (
    'or, to keep a driver of CUDA 12, "pip install warp-lang==1.17.0" and the build of torch for '
    "CUDA 12 from pytorch.org"
)


@dataclass(frozen=True)
class Gpu:
    """A CUDA device that torch can see."""

    name: str
    capability: tuple[int, int]  # CUDA compute capability, for example (8, 9)
    memory: int = 0  # bytes

    @property
    def version(self) -> str:
        """The compute capability as text."""
        return ".".join(map(str, self.capability))


@dataclass(frozen=True)
class CudaFacts:
    """Driver, GPUs, and support of CUDA in torch and Warp."""

    driver: bool  # whether an NVIDIA driver is installed
    torch_cuda: str | None  # CUDA version that torch was built for; None for the CPU-only build
    architectures: tuple[str, ...] = ()  # that torch has kernels for, such as sm_86
    gpus: tuple[Gpu, ...] = ()
    warp_gpus: int = 0  # number of GPUs that Warp can open


@dataclass(frozen=True)
class DeviceChoice:
    """The device to compute on, and why it was chosen, for the user."""

    device: torch.device
    reason: str


def cuda_facts() -> CudaFacts:
    """Collect the facts from the system, torch and Warp (which ``warp_launch`` has started)."""
    has_driver = _driver_library() is not None
    if torch.version.cuda is None or not torch.cuda.is_available():
        return CudaFacts(has_driver, torch.version.cuda)
    gpus = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        capability = (properties.major, properties.minor)
        gpus.append(Gpu(properties.name, capability, properties.total_memory))
    return CudaFacts(
        driver=has_driver,
        torch_cuda=torch.version.cuda,
        architectures=tuple(torch.cuda.get_arch_list()),
        gpus=tuple(gpus),
        warp_gpus=warp_launch.wp.get_cuda_device_count(),
    )


def choose_device(kind: str, gpu: int | None, facts: CudaFacts | None = None) -> DeviceChoice:
    """Choose the device to compute on.

    Args:
        kind: ``auto``, ``cpu`` or ``cuda``.
        gpu: Number of the GPU; None: the first usable one.
        facts: If None, they are collected.

    Raises:
        UserError: There is no such GPU, or none is usable and the kind is ``cuda``.
    """
    if kind == "cpu":
        no_effect = "" if gpu is None else f" (--gpu {gpu} has no effect beside it)"
        return DeviceChoice(torch.device("cpu"), f"computing on the CPU: --device cpu{no_effect}")
    facts = facts or cuda_facts()
    if gpu is not None and facts.gpus and not 0 <= gpu < len(facts.gpus):
        choices = ", ".join(f"{i}: {g.name}" for i, g in enumerate(facts.gpus))
        raise UserError(f"--gpu {gpu}: there is no such CUDA device; choose from {choices}")
    candidates = range(max(1, len(facts.gpus))) if gpu is None else [gpu]
    obstacles = []
    for index in candidates:
        obstacle = _obstacle_to(index, facts)
        if obstacle is None:
            usable = facts.gpus[index]
            return DeviceChoice(
                torch.device("cuda", index),
                f"computing on cuda:{index}: {usable.name}, compute capability {usable.version}",
            )
        obstacles.append(obstacle)
    if kind == "cuda":
        raise UserError(f"--device cuda: {obstacles[0]}; or pass --device cpu")
    no_effect = "" if gpu is None else f"--gpu {gpu} has no effect; "
    return DeviceChoice(torch.device("cpu"), f"computing on the CPU: {no_effect}{obstacles[0]}")


def make_current(device: torch.device) -> None:
    """Make a GPU the current one, to which pinned memory, streams and libraries belong.

    Otherwise each of several processes would open a context on the first GPU, of half a gigabyte.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)


def float32_tensor(array: np.ndarray) -> Tensor:
    """Return a host tensor with a copy of the values in single precision."""
    return torch.from_numpy(array.astype(np.float32))


def upload(tensor: Tensor, device: torch.device) -> Tensor:
    """Send a host tensor to a device; to a GPU through pinned memory, without waiting."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        # torch reuses a pinned block only after the copies out of it have ended.
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def upload_into(target: Tensor, tensor: Tensor) -> None:
    """Send a host tensor to where a tensor of a device lies, likewise."""
    target.copy_(pinned(tensor, target.device), non_blocking=True)


def pinned(tensor: Tensor, device: torch.device | None) -> Tensor:
    """Copy a host tensor to pinned memory if the device is a GPU and allows it; in any thread."""
    if device is None or device.type != "cuda":
        return tensor
    # Each thread has a current device.
    make_current(device)
    try:
        return tensor.pin_memory()
    except RuntimeError:
        # Systems limit pinned memory.
        return tensor


class SentNumbers:
    """Numbers on their way to the host, which waits for what was asked of a GPU before them alone.

    Args:
        numbers: On any device; they may change afterwards. (n,)
    """

    def __init__(self, numbers: Tensor) -> None:
        on_gpu = numbers.is_cuda
        self._arrived = torch.cuda.Event() if on_gpu else None
        self._numbers = torch.empty(numbers.shape, pin_memory=on_gpu, device="cpu")
        self._numbers.copy_(numbers, non_blocking=True)
        if self._arrived is not None:
            self._arrived.record()

    def tolist(self) -> list[float]:
        """Wait for the numbers, and return them."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._numbers.tolist()


def held_bytes(tensor: Tensor) -> int:
    """Bytes of host memory of a tensor; torch allocates pinned memory in powers of two."""
    return 1 << (tensor.nbytes - 1).bit_length() if tensor.is_pinned() else tensor.nbytes


@functools.lru_cache(maxsize=8192)
def constants(values: tuple[float, ...], device: torch.device) -> Tensor:
    """Numbers on a device, cached; never change them in place. (len(values),) float32

    The cache is large, because recorded launches read constants that nothing asks for any more.
    """
    return torch.tensor(values, dtype=torch.float32, device=device)


def driver_cuda_version() -> tuple[int, int] | None:
    """Newest CUDA version that the installed driver supports; None without a driver."""
    library = _driver_library()
    if library is None:
        return None
    version = ctypes.c_int(0)
    # The one function of the driver that needs no initialisation.
    error = library.cuDriverGetVersion(ctypes.byref(version))
    if error != 0:
        return None
    return version.value // 1000, version.value % 1000 // 10


def driver_version() -> str:
    """Version of the NVIDIA driver as its makers write it; empty where it is not known."""
    name = "nvml.dll" if sys.platform == "win32" else "libnvidia-ml.so.1"
    text = ctypes.create_string_buffer(_VERSION_BYTES)
    try:
        library = ctypes.CDLL(name)
        failed = library.nvmlInit_v2() != 0
        failed = failed or library.nvmlSystemGetDriverVersion(text, _VERSION_BYTES) != 0
    except (OSError, AttributeError):
        return ""
    return "" if failed else text.value.decode(errors="replace")


def _driver_library() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    except OSError:
        return None


def _obstacle_to(index: int, facts: CudaFacts) -> str | None:
    """Reason why a GPU, or any at all, cannot be used, and how to fix it; None if it can."""
    if not facts.driver:
        return f"no NVIDIA driver was found; with an NVIDIA GPU, {INSTALL_DRIVER}"
    if facts.torch_cuda is None:
        return f"torch {torch.__version__} is the CPU-only build; {INSTALL_CUDA_TORCH}"
    if not facts.gpus and os.environ.get("CUDA_VISIBLE_DEVICES", "0") in ("", "-1"):
        return "CUDA_VISIBLE_DEVICES hides every GPU; unset it"
    if not facts.gpus:
        return (
            f"torch finds no GPU that works with CUDA {facts.torch_cuda}, so the driver is too "
            f"old or has to be restarted; {INSTALL_DRIVER}"
        )
    gpu = facts.gpus[index]
    if gpu.capability < MIN_CAPABILITY:
        oldest = ".".join(map(str, MIN_CAPABILITY))
        return (
            f"{gpu.name} has compute capability {gpu.version}, below the {oldest} that is needed; "
            "use a newer GPU"
        )
    if not any(_runs_on(name, gpu.capability) for name in facts.architectures):
        return (
            f"torch {torch.__version__} has no kernels for {gpu.name} (compute capability "
            f"{gpu.version}), it is too old or too new for this GPU; {INSTALL_CUDA_TORCH}"
        )
    if index >= facts.warp_gpus:
        return (
            f"Warp cannot open {gpu.name}, so the driver is too old for it: {MIN_DRIVER} or newer "
            f"is needed; {INSTALL_DRIVER}, "
            f'then "pip install -r requirements-without-torch.txt"; {KEEP_DRIVER}'
        )
    return None


def _runs_on(architecture: str, capability: tuple[int, int]) -> bool:
    """Whether kernels built for ``sm_86`` or ``compute_90`` run on a GPU."""
    kind, _, digits = architecture.partition("_")
    digits = digits.rstrip("af")
    if not digits.isdigit():
        return False
    built_for = (int(digits[:-1]), int(digits[-1]))
    is_compatible = kind == "compute" or built_for[0] == capability[0]
    return is_compatible and built_for <= capability
