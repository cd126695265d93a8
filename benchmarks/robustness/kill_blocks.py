# SPDX-License-Identifier: Apache-2.0
"""Kill workers and clients of a run in blocks: ``python benchmarks/robustness/kill_blocks.py``.

A small scene is trained in blocks on a cluster of this machine, and processes of it are killed at
random moments, some of them the client itself, which is then started again. In the end the results
must be those of an undisturbed run, to the bit, and no process may be left. Linux only.
"""

from __future__ import annotations

import argparse
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

import sugar_utils  # noqa: F401  before torch

# isort: split
from sugar_pipeline.demo.demo_scene import make_demo_scene
from sugar_utils.entrypoint import run_main
from sugar_utils.errors import UserError
from sugar_utils.files import file_digest
from sugar_utils.flags import Parser, positive_int

ROOT = Path(__file__).resolve().parent.parent.parent
TASK = "sugar_pipeline.blocks.block_task"  # in the command line of a task
RESULTS = ("mesh.ply", "splats.ply")
FLAGS = "-r multiview --schedule_scale 0.02 --max_gaussians 3000 -v 20000 --stop_after mesh"
PAUSE = (1.0, 12.0)  # seconds between two kills
CLIENT_SHARE = 0.25  # of the kills that hit the client
LEAVING = 30.0  # seconds within which processes of a killed client have to be gone
LONGEST = 3600.0  # seconds of the last, undisturbed part


@dataclass
class Campaign:
    """A run that is disturbed."""

    command: list[str]
    folder: Path  # of all files of the run
    kills: int
    log: Path
    rng: random.Random
    hit: Counter[str] = field(default_factory=Counter)

    def run(self) -> None:
        """Start the client as often as needed until all kills are made and the run has ended."""
        while True:
            with self.log.open("ab") as output:
                client = subprocess.Popen(self.command, cwd=ROOT, stdout=output, stderr=output)
            ended = self._disturb(client)
            if ended and client.returncode == 0:
                return
            if not ended:
                self._wait_until_gone(client.pid)

    def _disturb(self, client: subprocess.Popen[bytes]) -> bool:
        """Kill processes of a client; return whether it ended by itself."""
        while self.hit.total() < self.kills:
            time.sleep(self.rng.uniform(*PAUSE))
            if client.poll() is not None:
                return True
            if self.rng.random() < CLIENT_SHARE:
                self.hit["client"] += 1
                client.kill()
                client.wait()
                return False
            self._kill_one_of(psutil.Process(client.pid).children(recursive=True))
        client.wait(LONGEST)
        return True

    def _kill_one_of(self, processes: list[psutil.Process]) -> None:
        named = [(kind_of(process), process) for process in processes]
        targets = [(kind, process) for kind, process in named if kind in ("worker", "task")]
        if not targets:
            return
        kind, process = self.rng.choice(targets)
        try:
            process.kill()
        except psutil.NoSuchProcess:
            return
        self.hit[kind] += 1

    def _wait_until_gone(self, pid: int) -> None:
        """Wait until the tasks of a killed client are gone.

        Raises:
            UserError: Some are not.
        """
        end = time.monotonic() + LEAVING
        while time.monotonic() < end:
            if not any(TASK in line for line in left_over(self.folder)):
                return
            time.sleep(0.5)
        raise UserError(f"tasks of the killed client {pid} are still there after {LEAVING:.0f} s")


def kind_of(process: psutil.Process) -> str:
    """Tell a worker of Dask, a task, and other processes of a run apart."""
    try:
        words = " ".join(process.cmdline())
    except psutil.Error:
        return "gone"
    if TASK in words:
        return "task"
    return "worker" if "multiprocessing.spawn" in words else "other"


def left_over(folder: Path) -> list[str]:
    """Command lines of processes that still work on a folder."""
    lines = []
    for process in psutil.process_iter():
        try:
            line = " ".join(process.cmdline())
        except psutil.Error:
            continue
        if str(folder) in line and process.pid != psutil.Process().pid:
            lines.append(line)
    return lines


def run(args: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        scene = root / "scan"
        make_demo_scene(scene, n_views=5 * args.blocks, width=96, height=72)
        command = [sys.executable, "-m", "sugar_pipeline", "run", "-s", str(scene)]
        command += ["--blocks", str(args.blocks), "--force", "True", *FLAGS.split(), "--output_dir"]
        print("undisturbed run", flush=True)
        subprocess.run([*command, str(root / "calm")], cwd=ROOT, check=True, capture_output=True)
        disturbed = [*command, str(root / "disturbed"), "--cluster", "local:2"]
        campaign = Campaign(disturbed, root, args.kills, root / "log.txt", random.Random(args.seed))
        start = time.monotonic()
        campaign.run()
        minutes = (time.monotonic() - start) / 60
        print(f"{campaign.hit.total()} kills in {minutes:.1f} minutes: {dict(campaign.hit)}")
        differing = []
        for name in RESULTS:
            places = [root / kind / "scan" / name for kind in ("calm", "disturbed")]
            if len({file_digest(place) for place in places}) > 1:
                differing.append(name)
        orphans = left_over(root)
        print(f"files that differ: {differing or 'none'}; processes left: {orphans or 'none'}")
        if differing or orphans:
            raise UserError("the disturbed run is not like the undisturbed one")


def parser() -> Parser:
    flags = Parser(description="Kill workers and clients of a run in blocks.")
    flags.add_argument("--kills", type=positive_int, default=50)
    flags.add_argument("--blocks", type=positive_int, default=9)
    flags.add_argument("--seed", type=int, default=0)
    return flags


if __name__ == "__main__":
    if not hasattr(signal, "SIGKILL"):
        sys.exit("Linux only")
    sys.exit(run_main(lambda: run(parser().parse_args())))
