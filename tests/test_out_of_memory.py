# SPDX-License-Identifier: Apache-2.0
"""A step that runs out of memory is repeated with less of it, and nothing is lost."""

from __future__ import annotations

import gc
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gaussian_splatting.engine.memory_plan import cheaper
from gaussian_splatting.engine.reporting.progress import Reporter
from gaussian_splatting.rasterization.rasterizers import WarpRasterizer
from gaussian_splatting.train import main as train_vanilla
from sugar_trainers.coarse_stage import CoarseStage
from sugar_utils.memory import out_of_memory
from tests.support.brief_runs import brief_coarse
from tests.support.tiny_scene import finish, load_pt, make_tiny_scene, run_cli
from tests.support.warm_processes import WarmProcess

ERRORS = (
    torch.OutOfMemoryError("CUDA out of memory"),
    MemoryError("no room"),
    RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 1 bytes"),
    RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes"),
)


def tensors_of(output: Path) -> dict[str, torch.Tensor]:
    last = max(output.rglob("*.pt"), key=lambda path: int(path.stem))
    saved = torch.load(last, weights_only=True)
    moments = saved["optimizer_state_dict"]["state"]
    return {
        **saved["state_dict"],
        **{f"{i} {name}": m for i, group in moments.items() for name, m in group.items()},
    }


def same_bits(first: Path, second: Path) -> bool:
    a, b = tensors_of(first), tensors_of(second)
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def fail_on_whole_images(monkeypatch, error: Exception, channels: int = 3) -> list[int]:
    """Let the backward pass through an unsplit image fail when it has enough channels."""
    original, failures = WarpRasterizer.backpropagate_rows, []

    def failing(self, splats, tiles, blended, *rest):
        whole = blended.pixels.shape[0] == tiles.height
        if whole and blended.background.shape[0] >= channels:
            failures.append(tiles.height)
            raise error
        original(self, splats, tiles, blended, *rest)

    monkeypatch.setattr(WarpRasterizer, "backpropagate_rows", failing)
    return failures


@pytest.fixture(scope="module")
def planned(scene, checkpoint, tmp_path_factory) -> Path:
    """Output of a run with strips by a flag."""
    output = tmp_path_factory.mktemp("planned")
    flags = ("--gradient_accumulation", True, "--accumulation_steps", 2)
    assert brief_coarse(scene, checkpoint, output, *flags) == 0
    return output


@pytest.mark.parametrize("error", ERRORS, ids=["cuda", "python", "windows", "linux"])
def test_lack_of_memory_is_known_by_its_error(error):
    assert out_of_memory(error)


@pytest.mark.slow
def test_a_run_that_ran_out_at_once_is_one_that_was_planned_so(
    planned, scene, checkpoint, tmp_path, monkeypatch, capsys
):
    failures = fail_on_whole_images(monkeypatch, ERRORS[0])
    assert brief_coarse(scene, checkpoint, tmp_path) == 0
    assert len(failures) == 1
    assert "out of memory in iteration" in "".join(capsys.readouterr())
    assert same_bits(planned, tmp_path)


@pytest.mark.slow
def test_gradients_of_terms_that_went_well_are_not_counted_twice(
    scene, checkpoint, tmp_path, monkeypatch
):
    original = CoarseStage.train_on

    def planned(stage, view, resources):
        if stage.phase(view.iteration) == "geometry" and resources.memory.split.strips == 1:
            resources = replace(resources, memory=cheaper(resources.memory))
        return original(stage, view, resources)

    with monkeypatch.context() as patch:
        patch.setattr(CoarseStage, "train_on", planned)
        assert brief_coarse(scene, checkpoint, tmp_path / "planned") == 0
    # By then the sampling terms have sent their gradients to the positions.
    failures = fail_on_whole_images(monkeypatch, MemoryError(), channels=6)
    assert brief_coarse(scene, checkpoint, tmp_path / "failed") == 0
    assert len(failures) == 1
    assert same_bits(tmp_path / "planned", tmp_path / "failed")


def test_other_errors_are_not_taken_for_it(scene, checkpoint, tmp_path, monkeypatch):
    failures = fail_on_whole_images(monkeypatch, RuntimeError("shapes differ"))
    with pytest.raises(RuntimeError, match="shapes differ"):
        brief_coarse(scene, checkpoint, tmp_path)
    assert len(failures) == 1


def test_where_no_plan_helps_one_line_says_so(scene, tmp_path, monkeypatch, capsys):
    def failing(*_, **__):
        raise MemoryError

    monkeypatch.setattr(WarpRasterizer, "blend_rows", failing)
    # Once for each plan, and slow beside all that other tests have left.
    monkeypatch.setattr(gc, "collect", lambda: 0)
    code = run_cli(train_vanilla, "-s", scene.root, "-m", tmp_path, "--iterations", 2)
    assert code == 2
    assert "out of memory in iteration 1 with every plan tried" in capsys.readouterr().err


LIMITED = """
import resource, sys
from gaussian_splatting import train
from gaussian_splatting.vanilla import vanilla_stage as vanilla
from sugar_utils.entrypoint import run_main

room = int(sys.argv.pop()) * 2**20
original = vanilla.VanillaStage.accumulate

def accumulate(stage, view, resources):
    unlimited = resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY
    if view.iteration == 2 and unlimited:
        # All kernels are compiled, so that from here on only tensors grow.
        used = 1024 * int(next(x for x in open("/proc/self/status") if "VmSize" in x).split()[1])
        resource.setrlimit(resource.RLIMIT_AS, (used + room, used + room))
    return original(stage, view, resources)

vanilla.VanillaStage.accumulate = accumulate
sys.exit(run_main(train.main))
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits address space on Linux")
def test_under_a_real_limit_training_degrades_and_finishes(tmp_path):
    scene = make_tiny_scene(tmp_path / "scene", n_views=3, zoom=24)

    script = tmp_path / "limited.py"
    script.write_text(LIMITED, encoding="utf-8")

    def train_with(mib: int, output: Path) -> tuple[int, str, str]:
        flags = ["-s", scene.root, "-m", output, "--iterations", 4, mib]
        return finish(WarmProcess(str(script), [str(flag) for flag in flags]))

    code, plenty, err = train_with(4096, tmp_path / "plenty")
    assert code == 0, err
    assert "out of memory" not in plenty
    code, out, err = train_with(56, tmp_path / "little")
    assert code == 0, err
    assert "out of memory in iteration 2: repeated, and continued, with images in" in out + err
    saved = load_pt(tmp_path / "little" / "checkpoints" / "4.pt")
    assert saved["iteration"] == 4
    assert all(values.isfinite().all() for values in saved["state_dict"].values())
    # As 3DGS does, the last iteration makes no step.
    assert {int(state["step"]) for state in saved["optimizer_state_dict"]["state"].values()} == {3}


def test_views_that_cannot_be_measured_do_not_end_a_run(scene, tmp_path, monkeypatch, capsys):
    def failing(*_):
        raise MemoryError("no room for it")

    monkeypatch.setattr(Reporter, "evaluate", failing)
    code = run_cli(train_vanilla, "-s", scene.root, "-m", tmp_path, "--iterations", 2, "--eval")
    assert code == 0
    said = "".join(capsys.readouterr())
    assert "not enough memory to measure the views; training goes on (no room for it)" in said
    assert (tmp_path / "checkpoints" / "2.pt").is_file()
