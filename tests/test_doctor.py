# SPDX-License-Identifier: Apache-2.0
"""The doctor names what is wrong and how to fix it, and trains nothing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import train
from gaussian_splatting.formats.ply import read_gaussian_ply, write_gaussian_ply
from gaussian_splatting.rasterization import self_test
from gaussian_splatting.scenes.scene import load_scene
from sugar_pipeline import doctor as machine_checkup
from sugar_pipeline.doctor import (
    BACKENDS,
    Finding,
    gaussian_findings,
    machine_findings,
    scene_findings,
)
from sugar_pipeline.pipeline.pipeline_flags import train_parser
from sugar_trainers.capture import SugarSize
from sugar_utils.device import CudaFacts, Gpu
from tests.support.tiny_scene import run_cli, tiny_cloud

NO_CUDA = CudaFacts(driver=False, torch_cuda=None)


def by_name(findings: list[Finding]) -> dict[str, Finding]:
    return {finding.what: finding for finding in findings}


def read(scene):
    return load_scene(scene.root, size_rule=SugarSize(), notify=lambda text: None)


def test_a_machine_scene_and_checkpoint_in_order_pass(scene, checkpoint, tmp_path, capsys):
    flags = ("-s", scene.root, "-c", checkpoint, "--output_dir", tmp_path / "output")
    assert run_cli(train.main, "--doctor", *flags) == 0
    said = capsys.readouterr().out
    for name in (
        "torch",
        "device",
        "rasterizer warp",
        "meshing",
        "camera extent",
        "training size",
        "longest axes",
        "duplicates",
        "visible",
        "memory of coarse training",
    ):
        assert name in said
    assert "no problems" in said
    assert not (tmp_path / "output").exists()


def test_flags_that_the_doctor_names_exist():
    known = train_parser(None)._option_string_actions
    texts = [*machine_checkup.OPTIONAL.values(), *(f"--rasterizer {name}" for name in BACKENDS)]
    named = [text for text in texts if text.startswith("--")]
    assert len(named) == 3
    for flag, value in map(str.split, named):
        assert value in known[flag].choices, flag


def test_nothing_but_the_machine_is_looked_at_without_a_scene(capsys):
    assert run_cli(train.main, "--doctor") == 0
    assert "camera extent" not in capsys.readouterr().out


def test_a_scene_that_cannot_be_read_is_a_problem_with_exit_code_2(tmp_path, capsys):
    assert run_cli(train.main, "--doctor", "-s", tmp_path) == 2
    out, err = capsys.readouterr()
    assert "no scene found" in out
    assert err.strip() == "error: the doctor found 1 problem(s), see the arrows above"


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        (CudaFacts(driver=True, torch_cuda=None), "CPU-only build"),
        (CudaFacts(driver=True, torch_cuda="12.6"), "driver is too"),
        (
            CudaFacts(True, "12.6", ("sm_75",), (Gpu("GeForce GTX 980", (5, 2)),), 1),
            "below the 7.5 that is needed",
        ),
    ],
    ids=["cpu_only_torch", "old_driver", "old_gpu"],
)
def test_a_gpu_that_is_there_and_not_used_is_a_problem(facts, words, tmp_path, monkeypatch):
    monkeypatch.setattr(machine_checkup, "available_bytes", lambda device: 2**34)
    device = by_name(machine_findings("auto", None, tmp_path, facts))["device"]
    assert device.state == "problem"
    assert words in device.value
    on_purpose = by_name(machine_findings("cpu", None, tmp_path, facts))["device"]
    assert on_purpose.state == "ok"


@pytest.mark.parametrize(("supported", "state"), [((12, 9), "problem"), ((13, 0), "ok")])
def test_a_driver_that_is_too_old_for_the_kernels_is_named(supported, state, tmp_path, monkeypatch):
    monkeypatch.setattr(machine_checkup.devices, "driver_cuda_version", lambda: supported)
    monkeypatch.setattr(machine_checkup, "available_bytes", lambda device: 2**34)
    facts = CudaFacts(driver=True, torch_cuda="13.0")
    driver = by_name(machine_findings("cpu", None, tmp_path, facts))["NVIDIA driver"]
    assert driver.state == state
    assert ("driver 580 or newer" in driver.advice) == (state == "problem")
    assert ("warp-lang==1.17.0" in driver.advice) == (state == "problem")


@pytest.mark.parametrize(("supported", "state"), [((12, 2), "ok"), ((11, 8), "problem")])
def test_with_an_older_warp_a_driver_of_cuda_12_will_do(supported, state, tmp_path, monkeypatch):
    monkeypatch.setattr(machine_checkup.devices, "driver_cuda_version", lambda: supported)
    monkeypatch.setattr(machine_checkup, "WARP_VERSION", (1, 17))
    facts = CudaFacts(driver=True, torch_cuda="12.8")
    driver = by_name(machine_findings("cpu", None, tmp_path, facts))["NVIDIA driver"]
    assert driver.state == state


def test_a_wrong_rasterizer_is_found_out(tmp_path, monkeypatch):
    right = self_test.rasterize

    def wrong(*args, **kwargs):
        output = right(*args, **kwargs)
        return replace(output, maps=replace(output.maps, depth=output.depth + 0.1))

    monkeypatch.setattr(self_test, "rasterize", wrong)
    found = by_name(machine_findings("cpu", None, tmp_path, NO_CUDA))["rasterizer warp"]
    assert found.state == "problem"
    assert "its depth differs" in found.value


def test_missing_packages_and_little_room_are_named(tmp_path, monkeypatch):
    monkeypatch.setattr(machine_checkup, "_version", lambda package: None)
    monkeypatch.setattr(machine_checkup, "available_bytes", lambda device: 2**30)
    found = by_name(machine_findings("cpu", None, tmp_path, NO_CUDA))
    assert found["plyfile"].state == "problem"
    assert found["tensorboard"].state == "ok"
    assert found["free main memory"].state == "warning"


def test_a_photograph_that_cannot_be_opened_is_named(scene):
    read_scene = read(scene)
    broken = replace(read_scene.train_cameras[0], image_path=Path(__file__))
    read_scene = replace(read_scene, train_cameras=[broken, *read_scene.train_cameras[1:]])
    found = by_name(scene_findings(read_scene))["photographs"]
    assert found.state == "problem"
    assert broken.name in found.advice


def test_few_views_few_points_and_no_extent_are_named(scene):
    bare = replace(read(scene), points=np.zeros((0, 3), np.float32), extent=0.0)
    found = by_name(scene_findings(bare))
    assert found["cameras"].state == "warning"
    assert found["points of the reconstruction"].state == "warning"
    bare_start = by_name(scene_findings(bare, starts_from_points=True))
    assert bare_start["points of the reconstruction"].state == "problem"
    assert found["camera extent"].state == "problem"


@pytest.mark.parametrize(
    ("what", "state", "damage"),
    [
        ("visible", "problem", lambda c: replace(c, means=c.means + 1e3)),
        ("duplicates", "warning", lambda c: replace(c, means=c.means[:20].repeat(10, 1))),
        ("not finite", "problem", lambda c: replace(c, log_scales=c.log_scales * torch.nan)),
        ("degenerate", "warning", lambda c: replace(c, log_scales=c.log_scales + 9)),
        (
            "opacity below 0.5",
            "warning",
            lambda c: replace(c, opacity_logits=-(c.opacity_logits**2)),
        ),
    ],
)
def test_what_is_wrong_with_gaussians_is_named(what, state, damage, scene):
    good = by_name(gaussian_findings(tiny_cloud(), read(scene)))
    assert good[what].state == "ok"
    found = by_name(gaussian_findings(damage(tiny_cloud()), read(scene)))[what]
    assert found.state == state
    assert found.advice


def test_memory_that_does_not_suffice_is_a_problem(scene, checkpoint, capsys):
    flags = ("-s", scene.root, "-c", checkpoint, "--vram_budget", 1e-5)
    assert run_cli(train.main, "--doctor", *flags) == 2
    assert "does not fit" in capsys.readouterr().out


def test_an_empty_checkpoint_is_one_problem(scene, checkpoint, tmp_path, capsys):
    ply = tmp_path / "empty.ply"
    cloud = read_gaussian_ply(next(checkpoint.rglob("point_cloud.ply")), lambda text: None)
    write_gaussian_ply(ply, cloud.select(torch.zeros(len(cloud), dtype=torch.bool)))
    assert run_cli(train.main, "--doctor", "-s", scene.root, "-c", ply) == 2
    assert "holds no Gaussians" in capsys.readouterr().out
