# SPDX-License-Identifier: Apache-2.0
"""The checks for a GPU: tried on the CPU, on a pretended device, and broken on purpose."""

from __future__ import annotations

import hashlib
import importlib
import io
import json
import subprocess
import sys
import tarfile
import time
from collections import namedtuple
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import BinaryIO

import pytest
import torch

from benchmarks.gpu import check as gpu_check
from benchmarks.gpu.common import Check, Finding, Setup, compare, equal
from benchmarks.gpu.comparison import by_cuda_rasterizer
from benchmarks.gpu.recorded import CountingRecorder
from benchmarks.gpu.runner import FAILED, OK, OUT_OF_TIME, SKIPPED, Runner, Section
from benchmarks.gpu.training import _recordings
from gaussian_splatting.rasterization import project
from tests.support.command_line import WITHOUT_VALUE, as_flags
from tests.support.pretend_device import pretend_gpu
from tests.support.step_scenes import large_scene
from tests.support.tiny_scene import REPOSITORY, run_cli
from tests.support.warm_processes import WarmProcess

BROKEN = Section("broken", "tests.support.broken_checks", 1.0)
SETUP = {"device": "cpu", "quick": True, "scene": None, "work": ""}

NOT_PRETENDED = {"tile lists", "resume", "same bits, dn_consistency", "same bits, density"}
"""Lists of nothing leave values that the pretended device takes for those of the host's lists;
whole runs have a test of their own, in ``test_device_neutral``; the last mode of SuGaR, with
samples, stands for the others."""

NOT_PRETENDED_SECTION = "training"
"""Whole runs, likewise."""

LEFT_OUT = ("open3d", "viser", "av", "xatlas", "trimesh", "pytest", "bpy")
"""Packages that ``pack_for_gpu.sh`` does not carry."""


def test_errors_are_relative_to_the_largest_of_a_column():
    expected = torch.tensor([[100.0, 1.0], [50.0, -2.0]])
    found = expected + torch.tensor([[0.1, 0.0], [0.0, 0.001]])
    finding = compare("x", found, expected, 2e-3)
    assert finding.ok
    assert finding.figures["largest"] == pytest.approx(1e-3, rel=1e-3)
    assert not compare("x", found, expected, 9e-4).ok
    assert not compare("x", torch.full((2, 2), torch.nan), expected, 1e9).ok
    assert not compare("x", expected[:1], expected, 1.0).ok
    assert not equal("x", expected + torch.eye(2), expected).ok
    assert equal("x", expected, expected).ok


def test_few_entries_may_lie_beyond_a_threshold_but_not_far():
    expected = torch.ones(1000)
    found = expected.clone()
    found[0] = 1.001
    assert not compare("x", found, expected, 1e-5).ok
    assert compare("x", found, expected, 1e-5, flips=1e-3).ok
    found[0] = 5.0
    assert not compare("x", found, expected, 1e-5, flips=1e-3).ok


def test_other_packages_are_given_the_camera_as_they_project_it():
    """Packages with the interface of diff_gaussian_rasterization multiply rows by matrices."""
    scene, camera = large_scene(50, 64, 48, "cpu")
    given = {}

    class Rasterizer:
        def __init__(self, raster_settings):
            given.update(raster_settings._asdict())

        def __call__(self, **tensors):
            given.update(tensors)
            return torch.zeros(3, 48, 64), None

    fields = "image_height image_width tanfovx tanfovy viewmatrix projmatrix campos sh_degree"
    package = SimpleNamespace(
        GaussianRasterizationSettings=namedtuple("Settings", fields.split()),
        GaussianRasterizer=Rasterizer,
    )
    assert by_cuda_rasterizer(package)(scene, camera).shape == (48, 64, 3)
    rows = torch.nn.functional.pad(scene.means, (0, 1), value=1.0)
    clip = rows @ given["projmatrix"]
    pixels = (clip[:, :2] / clip[:, 3:] + 1) * torch.tensor([64.0, 48.0]) / 2
    expected = project(scene, camera).means2d + 0.5
    is_shown = expected.abs().sum(dim=1) > 1
    torch.testing.assert_close(pixels[is_shown], expected[is_shown], rtol=1e-4, atol=1e-3)
    assert int(is_shown.sum()) > 10
    torch.testing.assert_close((rows @ given["viewmatrix"])[:, 2], clip[:, 3])
    assert given["shs"].shape == (50, 16, 3)
    assert given["opacities"].shape == (50, 1)


def test_large_scenes_are_made_of_copies_that_differ(monkeypatch):
    monkeypatch.setattr("tests.support.step_scenes.REPLICATED", 300)
    scene, _ = large_scene(1000, 64, 48, "cpu")
    assert len(scene) == 1000
    assert torch.equal(scene.opacities[:300], scene.opacities[300:600])
    assert scene.means.unique(dim=0).shape[0] == 1000


def test_arguments_that_name_nothing_are_refused(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["check.py", "--sections", "nonsense"])
    with pytest.raises(SystemExit) as leaving:
        gpu_check.main()
    assert leaving.value.code == 2
    assert "--sections nonsense: there is none of them" in capsys.readouterr().err


class WarmWorker(WarmProcess):
    """A process of a runner that has the libraries loaded."""

    def __init__(
        self, command: list[str], *, env: dict[str, str], stdout: BinaryIO, **settings: object
    ) -> None:
        super().__init__("benchmarks/gpu/check.py", command[2:], env=env, output=Path(stdout.name))


class WorkHere:
    """A process of a runner whose work is done in this process: to start one takes seconds."""

    def __init__(self, command: list[str], **settings: object) -> None:
        order = command[command.index("--worker") + 1]
        self._code = gpu_check.work(json.loads(order))

    def wait(self, timeout: float) -> int:
        return self._code


def start_workers_by(monkeypatch: pytest.MonkeyPatch, kind: type) -> None:
    """Have runners start processes of another kind."""
    here = SimpleNamespace(**{**vars(subprocess), "Popen": kind})
    monkeypatch.setattr("benchmarks.gpu.runner.subprocess", here)


@pytest.fixture
def warm_workers(monkeypatch) -> None:
    """Runners start processes that have the libraries loaded."""
    start_workers_by(monkeypatch, WarmWorker)


ROWS_OF_BROKEN = [
    ("fine", "first", OK),
    ("fine", "second", FAILED),
    ("raises", "before", OK),
    ("raises", "", FAILED),
    ("dies", "before", OK),
    ("dies", "", FAILED),
    ("hangs", "before", OK),
    ("hangs", "", FAILED),
    ("needs CUDA", "", SKIPPED),
    ("fine again", "first", OK),
    ("fine again", "second", FAILED),
]


@pytest.mark.slow
@pytest.mark.parametrize(("is_apart", "n_processes"), [(False, 3), (True, 4)])
def test_one_broken_check_hides_no_other(warm_workers, tmp_path, is_apart, n_processes):
    """Checks share a process until one breaks it, or have processes of their own."""
    section = replace(BROKEN, is_apart=is_apart)
    runner = Runner(section, SETUP, time.monotonic() + 300, tmp_path)
    assert [(row.check, row.what, row.status) for row in runner.run()] == ROWS_OF_BROKEN
    assert runner._n_processes == n_processes
    shown = {row.check: row.shown for row in runner.rows if not row.what}
    assert shown["raises"] == "ValueError: two lines"
    assert shown["dies"] == "the process ended with code 7: words of the dying"
    assert shown["hangs"] == "took too long"
    assert shown["needs CUDA"] == "needs CUDA"


@pytest.mark.slow
def test_what_broke_runs_once_more_by_itself(warm_workers, tmp_path):
    """As on CUDA, with launches that block."""
    runner = Runner(BROKEN, SETUP, time.monotonic() + 300, tmp_path)
    for name in ("raises", "dies"):
        runner._add(name, FAILED, "broken")
    runner.explain()
    again = {row.check: row.shown for row in runner.rows}
    assert again["raises"] == "broken | with blocking launches: ValueError: two lines"
    assert again["dies"].endswith("code 7: words of the dying")


def test_a_process_that_cannot_be_killed_holds_nothing_up(tmp_path, monkeypatch):
    class Held:
        """A process in the hands of a driver."""

        def wait(self, timeout):
            raise subprocess.TimeoutExpired("check", timeout)

        def kill(self):
            """Nothing happens."""

    monkeypatch.setattr(subprocess, "Popen", lambda *command, **how: Held())
    rows = Runner(BROKEN, SETUP, time.monotonic() + 60, tmp_path).run()
    assert [(row.status, row.shown) for row in rows] == [(SKIPPED, OUT_OF_TIME)]


def test_what_was_never_run_on_a_gpu_comes_first():
    names = [section.name for section in gpu_check.SECTIONS]
    begin = ["environment", "compilation", "recorder", "recorded", "parity", "recorded_times"]
    assert names[: len(begin)] == begin
    assert names.index("training") < names.index("host_bands") < names.index("determinism")
    assert {section.name for section in gpu_check.SECTIONS if section.is_apart} == {"recorder"}


@pytest.mark.slow
def test_checks_import_nothing_that_is_left_out_of_the_pack():
    modules = [section.module for section in gpu_check.SECTIONS]
    program = (
        "import importlib, sys\n"
        f"sys.modules.update(dict.fromkeys({LEFT_OUT!r}))\n"
        f"for name in {modules!r}:\n"
        "    importlib.import_module(name)\n"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-1000:]


@pytest.mark.parametrize(
    ("mode", "on_cuda", "n_repeated", "log", "ok"),
    [
        ("auto", True, 80, "", True),
        ("auto", True, 80, "every launch is made by the host, without CUDA graphs: x", False),
        ("auto", True, 10, "", False),
        ("off", True, 0, "", True),
        ("off", True, 3, "", False),
        ("auto", False, 0, "", True),
    ],
)
def test_a_run_that_gives_up_recording_fails(mode, on_cuda, n_repeated, log, ok, tmp_path):
    (tmp_path / "log.txt").write_text(f"iteration 1\n{log}\n", encoding="utf-8")
    counter = CountingRecorder(None)
    counter.n_repeated = n_repeated
    setup = SimpleNamespace(on_cuda=on_cuda)
    assert _recordings(mode, setup, tmp_path, [counter], 100).ok == ok


@pytest.mark.slow
def test_a_section_ends_when_its_time_is_over(tmp_path):
    runner = Runner(BROKEN, SETUP, time.monotonic() - 1, tmp_path)
    assert [(row.check, row.shown) for row in runner.run()] == [("all", OUT_OF_TIME)]


@pytest.mark.slow
def test_a_section_that_cannot_start_is_a_failure(warm_workers, tmp_path):
    missing = Section("missing", "tests.no_such_module", 1.0)
    rows = Runner(missing, SETUP, time.monotonic() + 60, tmp_path).run()
    assert [row.status for row in rows] == [FAILED]
    assert "no_such_module" in rows[0].shown


def on_a_pretended_device(check: Check) -> Check:
    """The same check on a device that is not the host."""

    def run(setup: Setup) -> Iterator[Finding]:
        with pretend_gpu():
            findings = list(check.run(Setup("cpu:0", setup.quick, None, str(setup.work))))
        yield from findings

    return replace(check, run=run)


def pretend_device(monkeypatch: pytest.MonkeyPatch, section: Section) -> None:
    """Have the checks of a section run on a device that is not the host, where they can."""
    module = importlib.import_module(section.module)
    checks = tuple(
        check if check.name in NOT_PRETENDED else on_a_pretended_device(check)
        for check in module.CHECKS
    )
    monkeypatch.setattr(module, "CHECKS", checks)


@pytest.mark.slow
def test_every_section_reports_and_nothing_fails_or_mixes_host_and_device(
    tmp_path, monkeypatch, capsys
):
    start_workers_by(monkeypatch, WorkHere)
    for section in gpu_check.SECTIONS:
        if section.name != NOT_PRETENDED_SECTION:
            pretend_device(monkeypatch, section)
    # It would end this process.
    monkeypatch.setattr("faulthandler.dump_traceback_later", lambda seconds, exit: None)
    path = tmp_path / "check.json"
    # A busy machine must not run out of the time that is meant for a GPU.
    settings = as_flags(quick=WITHOUT_VALUE, device="cpu", minutes=30, json=path)
    code = run_cli(gpu_check.main, *settings)
    assert code == 0, capsys.readouterr().out[-3000:]
    rows = json.loads(path.read_text())["rows"]
    assert not [row for row in rows if row["status"] == FAILED]
    for section in gpu_check.SECTIONS:
        own = [row for row in rows if row["section"] == section.name]
        assert any(row["status"] == OK for row in own), section.name
        checks = importlib.import_module(section.module).CHECKS
        assert {row["check"] for row in own} == {check.name for check in checks}
    skipped = {row["shown"] for row in rows if row["status"] == SKIPPED}
    assert skipped == {"needs CUDA", "a quick try takes one size"}


def test_what_is_packed_is_unpacked_and_damage_is_named(tmp_path):
    parts, site = tmp_path / "parts", tmp_path / "site"
    parts.mkdir()
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:xz") as archive:
        content = b"x = 1\n" * 1000
        info = tarfile.TarInfo("package/module.py")
        info.size = len(content)
        archive.addfile(info, io.BytesIO(content))
    whole = packed.getvalue()
    pieces = {"site.00": whole[:100], "site.01": whole[100:]}
    for name, piece in pieces.items():
        (parts / name).write_bytes(piece)
    (parts / "checksums").write_text(
        "".join(f"{hashlib.sha256(p).hexdigest()}  {name}\n" for name, p in pieces.items())
    )

    def unpack() -> subprocess.CompletedProcess:
        script = REPOSITORY / "benchmarks" / "pack_for_gpu.sh"
        command = ["bash", str(script), "unpack", str(parts), str(site)]
        return subprocess.run(command, capture_output=True, text=True, timeout=60)

    done = unpack()
    assert done.returncode == 0, done.stderr
    assert (site / "package" / "module.py").read_bytes() == content
    (parts / "site.01").write_bytes(pieces["site.01"][:-1])
    assert unpack().returncode == 2
    assert "site.01: damaged on the way" in unpack().stderr
    (parts / "site.01").unlink()
    assert "site.01: missing" in unpack().stderr
