# SPDX-License-Identifier: Apache-2.0
"""Machine code of kernels, without a GPU: ``python benchmarks/gpu/machine_code.py``.

Warp compiles for any generation of GPUs on any machine. Instructions, registers and memory are read
from what comes out, for the kernels in use and for the first ones, and how many warps of each fit
onto a multiprocessor follows from them. What runs how often, and how fast, is not to be seen here.

``--others`` prints those of projection, fields and colour loss, which have no first ones.

Needs ``pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm``.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import sysconfig
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import sugar_utils  # noqa: F401  before torch

# isort: split
import warp as wp

from benchmarks.gpu.first_blending import first_block_kernels
from gaussian_splatting.losses.photometric_cuda import compare_columns
from gaussian_splatting.rasterization.blend_cuda import block_kernels
from gaussian_splatting.rasterization.projection_kernels import project_backward
from gaussian_splatting.rasterization.tile_coverage import count_tiles
from sugar_scene.fields.field_adjoint import sample_gradients_kernel
from sugar_scene.fields.field_device import evaluate_samples
from sugar_utils.errors import UserError
from sugar_utils.flags import Parser
from sugar_utils.frame import run_main

KERNELS = ("forward", "backward", "sum_pairs")
SETS = {"first": first_block_kernels, "new": block_kernels}

_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+ )?\s*([A-Z][\w.]*)", re.MULTILINE)
_KERNEL = re.compile(
    r"^\.text\.(?:\w+_locals__)?(\w+?)_[0-9a-f]{8}_cuda_kernel_forward:", re.MULTILINE
)
_USAGE = re.compile(
    r"Function (?:\w+_locals__)?(\w+?)_[0-9a-f]{8}_cuda_kernel_forward:\s*REG:(\d+)"
)
_REGISTERS = 65536
_PARTITIONS = 4


@dataclass(frozen=True)
class Multiprocessor:
    """What one of a generation holds (CUDA programming guide, table of compute capabilities).

    Attributes:
        warps: At most resident.
        blocks: The same.
        shared: Bytes of shared memory.
        reserved: Bytes of it that the system takes for each block.
    """

    warps: int
    blocks: int
    shared: int
    reserved: int = 1024


MULTIPROCESSORS = {
    75: Multiprocessor(32, 16, 64 * 1024, reserved=0),
    80: Multiprocessor(64, 32, 164 * 1024),
    86: Multiprocessor(48, 16, 100 * 1024),
    89: Multiprocessor(48, 24, 100 * 1024),
    90: Multiprocessor(64, 32, 228 * 1024),
    120: Multiprocessor(48, 24, 100 * 1024),
}


@dataclass(frozen=True)
class MachineCode:
    """What was read from the machine code of one kernel.

    Attributes:
        instructions: Without padding.
        per_pixel: Those of a pixel that a splat reaches: from one exponential to the next.
        exchanges: Instructions among them that ask other lanes.
        wide_loads: Loads among them of 16 bytes at once.
        spills: Instructions among them that move registers to local memory and back.
        registers: Of a thread.
        shared: Bytes of shared memory of a block, the system's not counted.
        threads: Of a block.
    """

    instructions: int
    per_pixel: int
    exchanges: int
    wide_loads: int
    spills: int
    registers: int
    shared: int
    threads: int

    def resident_warps(self, on: Multiprocessor) -> int:
        """How many warps a multiprocessor holds at once."""
        in_block = self.threads // 32
        per_warp = 32 * (-(-self.registers // 8) * 8)
        by_registers = _PARTITIONS * (_REGISTERS // _PARTITIONS // per_warp)
        blocks = min(on.blocks, on.warps // in_block, by_registers // in_block)
        if self.shared + on.reserved:
            blocks = min(blocks, on.shared // (self.shared + on.reserved))
        return blocks * in_block


def _tool(name: str) -> str:
    path = Path(sysconfig.get_paths()["purelib"]) / "nvidia" / "cu13" / "bin" / name
    if not path.exists():
        raise UserError(f"{path} is missing: pip install nvidia-cuda-{name}")
    return str(path)


def _run(name: str, *arguments: str) -> str:
    done = subprocess.run([_tool(name), *arguments], capture_output=True, text=True, check=True)
    return done.stdout


def machine_code(kernel: Any, architecture: int) -> MachineCode:
    """Compile one kernel's module and read the result.

    Args:
        kernel: Warp kernel, alone in its module.
        architecture: Compute capability times ten.

    Raises:
        UserError: A tool is not installed.
    """
    with tempfile.TemporaryDirectory() as folder:
        wp.compile_aot_module(
            kernel.module, device=None, arch=architecture, module_dir=folder, use_ptx=False
        )
        (binary,) = (str(path) for path in Path(folder).glob("*.cubin"))
        usage = _run("cuobjdump", "--dump-resource-usage", binary)
        listing = _run("nvdisasm", "-c", binary)
        (meta,) = Path(folder).glob("*.meta")
        notes = json.loads(meta.read_text(encoding="utf-8"))
    found = re.search(r"REG:(\d+) STACK:\d+ SHARED:(\d+)", usage)
    names = [name for name in _INSTRUCTION.findall(listing) if name != "NOP"]
    reserved = MULTIPROCESSORS[architecture].reserved if architecture >= 90 else 0

    def count(*starts: str) -> int:
        return sum(name.startswith(starts) for name in names)

    exponentials = [i for i, name in enumerate(names) if name == "MUFU.EX2"]
    gaps = [b - a for a, b in zip(exponentials, exponentials[1:], strict=False)]
    return MachineCode(
        instructions=len(names),
        per_pixel=round(statistics.median(gaps)) if gaps else 0,
        exchanges=count("SHFL", "REDUX"),
        wide_loads=count("LDS.128", "LDG.E.128", "LDGSTS.E.128"),
        spills=count("LDL", "STL"),
        registers=int(found[1]),
        # From compute capability 9.0 on, the compiler counts the system's part; Warp asks for more
        # when it launches.
        shared=int(found[2]) - reserved + sum(notes.values()),
        threads=kernel.module.options["block_dim"],
    )


COLUMNS = ("instructions", "per_pixel", "exchanges", "wide_loads", "spills", "registers", "shared")


def _row(name: str, n_channels: int, architecture: int) -> str:
    """First and new kernels of one kind, side by side."""
    codes = [machine_code(getattr(make(n_channels), name), architecture) for make in SETS.values()]
    cells = [[getattr(code, column) for code in codes] for column in COLUMNS]
    cells.append([code.resident_warps(MULTIPROCESSORS[architecture]) for code in codes])
    shown = [f"{first:,} → {new:,}" for first, new in cells]
    return " | ".join([name, str(n_channels), str(architecture), *shown])


def print_table(architectures: list[int], channels: list[int]) -> None:
    """One row for each kernel, number of channels and generation."""
    version = ".".join(map(str, wp.get_cuda_toolkit_version()))
    print(f"Warp {wp.__version__}, CUDA {version}; first → new\n")
    heads = ("kernel", "channels", "sm", "instructions", "per pixel", "exchanges", "16-byte loads",
        "spills", "registers", "shared bytes", "resident warps")  # fmt: skip
    print(f"| {' | '.join(heads)} |\n|---{'|--:' * (len(heads) - 1)}|")
    for name in KERNELS:
        for n_channels in channels:
            for architecture in architectures:
                print(f"| {_row(name, n_channels, architecture)} |", flush=True)


def print_others(architectures: list[int]) -> None:
    """One row for each kernel of the modules beside blending, and generation."""
    heads = ("kernel", "sm", "instructions", "loads", "16-byte loads", "local memory", "registers")
    print(f"| {' | '.join(heads)} |\n|---{'|--:' * (len(heads) - 1)}|")
    some = (count_tiles, project_backward, evaluate_samples, sample_gradients_kernel(),
            compare_columns)  # fmt: skip
    for kernel in some:
        for architecture in architectures:
            with tempfile.TemporaryDirectory() as folder:
                wp.compile_aot_module(
                    kernel.module, device=None, arch=architecture, module_dir=folder, use_ptx=False
                )
                (binary,) = (str(path) for path in Path(folder).glob("*.cubin"))
                usage = _run("cuobjdump", "--dump-resource-usage", binary)
                parts = _KERNEL.split(_run("nvdisasm", "-c", binary))[1:]
            registers = dict(_USAGE.findall(usage))
            for name, listing in sorted(zip(parts[::2], parts[1::2], strict=True)):
                names = [n for n in _INSTRUCTION.findall(listing) if n != "NOP"]
                loads = [n for n in names if n.startswith(("LDG", "LDS"))]
                wide = sum(".128" in n for n in loads)
                local = sum(n.startswith(("LDL", "STL")) for n in names)
                counts = (f"{len(names):,}", len(loads), wide, local, registers[name])
                print(f"| {' | '.join(map(str, (name, architecture, *counts)))} |", flush=True)


def main() -> int:
    """Parse the flags and print."""
    flags = Parser(description="Read the machine code of the blending kernels.")
    known = sorted(MULTIPROCESSORS)
    flags.add_argument("--arch", type=int, nargs="+", choices=known, default=[86, 89, 90, 120],
        metavar="SM", help=f"compute capabilities times ten, of {known}")  # fmt: skip
    flags.add_argument("--channels", type=int, nargs="+", default=[7], help="blended channels")
    flags.add_argument("--others", action="store_true", help="kernels beside blending instead")
    args: argparse.Namespace = flags.parse_args()
    if args.others:
        print_others(args.arch)
    else:
        print_table(args.arch, args.channels)
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))
