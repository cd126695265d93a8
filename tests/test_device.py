# SPDX-License-Identifier: Apache-2.0
"""Choosing a device: every way in which a GPU cannot be used is named, with how to fix it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import extract_mesh
import extract_refined_mesh_with_texture
import metrics
import train
import train_coarse_density
import train_coarse_sdf
import train_full_pipeline
import train_refined
from gaussian_splatting import train as vanilla
from gaussian_splatting.rasterization import WARP, compute
from gaussian_splatting.rasterization.compute import Compute, DeviceFlags
from sugar_pipeline.demo.demo_scene import demo_plan
from sugar_pipeline.pipeline.pipeline_flags import train_parser
from sugar_utils import device as device_module
from sugar_utils.device import CudaFacts, DeviceChoice, Gpu, choose_device, cuda_facts, upload
from sugar_utils.errors import UserError
from tests.support.command_words import full_plan, parse
from tests.support.tiny_scene import refusal, run_cli

ADA = Gpu("NVIDIA GeForce RTX 4070", (8, 9))
BLACKWELL = Gpu("NVIDIA GeForce RTX 5080", (12, 0))
PASCAL = Gpu("NVIDIA GeForce GTX 1080", (6, 1))
ARCHITECTURES = ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120")
GOOD = CudaFacts(True, "13.0", ARCHITECTURES, (ADA,), 1)
TWO = replace(GOOD, gpus=(PASCAL, BLACKWELL), warp_gpus=2)


def test_a_gpu_is_taken_where_there_is_one():
    choice = choose_device("auto", None, GOOD)
    assert choice.device == torch.device("cuda", 0)
    assert choice.reason == ("computing on cuda:0: NVIDIA GeForce RTX 4070, compute capability 8.9")


def test_the_first_usable_gpu_is_taken_and_a_number_is_obeyed():
    assert choose_device("auto", None, TWO).device == torch.device("cuda", 1)
    assert choose_device("cuda", 1, TWO).device == torch.device("cuda", 1)
    with pytest.raises(UserError, match=r"GTX 1080 has compute capability 6\.1, below the 7\.5"):
        choose_device("cuda", 0, TWO)


CASES = {
    "no driver": (CudaFacts(False, "13.0"), "no NVIDIA driver.*install the current driver"),
    "CPU-only torch": (CudaFacts(True, None), "is the CPU-only build; install the CUDA build"),
    "old driver": (CudaFacts(True, "13.0", ARCHITECTURES), "driver is too old.*install the curr"),
    "old GPU": (replace(GOOD, gpus=(PASCAL,)), "compute capability 6.1, below the 7.5"),
    "old torch": (
        replace(GOOD, gpus=(BLACKWELL,), architectures=("sm_75", "sm_90", "compute_120x")),
        "has no kernels for NVIDIA GeForce RTX 5080.*install the CUDA build",
    ),
    "Warp": (replace(GOOD, warp_gpus=0), "Warp cannot open"),
}


@pytest.mark.parametrize(("facts", "words"), CASES.values(), ids=CASES)
def test_obstacles_are_named_and_auto_falls_back(facts, words, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with pytest.raises(UserError, match=words) as caught:
        choose_device("cuda", None, facts)
    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value)
    assert "--device cpu" in str(caught.value)
    choice = choose_device("auto", None, facts)
    assert choice.device == torch.device("cpu")
    assert choice.reason.startswith("computing on the CPU: ")
    assert choose_device("cpu", None, facts).device == torch.device("cpu")


def test_a_hidden_gpu_is_not_blamed_on_the_driver(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(UserError, match="CUDA_VISIBLE_DEVICES hides every GPU"):
        choose_device("cuda", None, CudaFacts(True, "13.0"))


@pytest.mark.parametrize("kind", ["auto", "cuda"])
@pytest.mark.parametrize("number", [-1, 1, 7])
def test_a_gpu_that_is_not_there_is_an_error(kind, number):
    with pytest.raises(UserError, match=rf"--gpu {number}: .*choose from 0: NVIDIA GeForce RTX"):
        choose_device(kind, number, GOOD)


def test_old_commands_with_a_gpu_number_run_without_a_gpu():
    choice = choose_device("auto", 0, CudaFacts(False, None))
    assert choice.device == torch.device("cpu")
    assert "--gpu 0 has no effect; no NVIDIA driver" in choice.reason
    assert "--gpu 3 has no effect" in choose_device("cpu", 3, GOOD).reason


@pytest.mark.parametrize(
    ("architectures", "capability", "runs"),
    [
        (("sm_86",), (8, 9), True),
        (("sm_86",), (8, 6), True),
        (("sm_89",), (8, 6), False),
        (("sm_90a",), (9, 0), True),
        (("sm_90",), (12, 0), False),
        (("sm_90", "compute_90"), (12, 0), True),
        (("sm_120",), (12, 0), True),
        (("sm_75",), (7, 5), True),
        ((), (8, 6), False),
    ],
)
def test_kernels_run_within_a_major_version_and_ptx_beyond(architectures, capability, runs):
    facts = replace(GOOD, architectures=architectures, gpus=(Gpu("GPU", capability),))
    assert (choose_device("auto", None, facts).device.type == "cuda") is runs


def test_this_machine_can_be_asked():
    facts = cuda_facts()
    assert (facts.torch_cuda is None) == (torch.version.cuda is None)
    assert bool(facts.gpus) == torch.cuda.is_available()
    choice = choose_device("auto", None)
    assert choice.device.type in ("cpu", "cuda")


def test_uploading_to_the_host_shares_memory():
    photograph = torch.zeros(2, 3, 3, dtype=torch.uint8)
    assert upload(photograph, torch.device("cpu")) is photograph


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_uploading_to_a_gpu_copies():
    photograph = torch.arange(6, dtype=torch.uint8)
    there = upload(photograph, torch.device("cuda", 0))
    assert there.is_cuda
    assert torch.equal(there.cpu(), photograph)


# Flags

ENTRIES = {
    "train": (train.main, "-s a -c b -r density"),
    "full": (train_full_pipeline.main, "-s a -r density"),
    "density": (train_coarse_density.main, "-s a -c b"),
    "sdf": (train_coarse_sdf.main, "-s a -c b"),
    "refined": (train_refined.main, "-s a -c b -m {mesh}"),
    "mesh": (extract_mesh.main, "-s a -c b -m c"),
    "texture": (extract_refined_mesh_with_texture.main, "-s a -c b -m c"),
    "metrics": (metrics.main, '--scene_config {{"a":"b"}} -r density'),
    "vanilla": (vanilla.main, "-s a -m b"),
}


@pytest.mark.parametrize(("main", "words"), ENTRIES.values(), ids=ENTRIES)
def test_every_entry_point_says_in_one_line_that_there_is_no_gpu(
    main, words, monkeypatch, capsys, tmp_path
):
    mesh = tmp_path / "mesh.ply"
    mesh.touch()
    monkeypatch.setattr(
        compute, "choose_device", lambda kind, gpu: choose_device(kind, gpu, CudaFacts(True, None))
    )
    (tmp_path / "a").mkdir()
    monkeypatch.chdir(tmp_path)
    given = words.format(mesh=mesh).split()
    error = refusal(capsys, main, *given, "--device", "cuda", "--gpu", 0)
    assert error.startswith("error: --device cuda: torch")
    assert "CPU-only build" in error


def chosen_gpu(monkeypatch) -> DeviceChoice:
    chosen = DeviceChoice(torch.device("cuda", 1), "computing on cuda:1")
    monkeypatch.setattr(compute, "choose_device", lambda *_: chosen)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    return chosen


def test_all_stages_of_a_pipeline_get_the_same_device(monkeypatch, tmp_path):
    chosen = chosen_gpu(monkeypatch)
    plan = full_plan("-s", tmp_path, "-r", "density")
    for stage in (plan.vanilla, plan.coarse, plan.mesh, plan.refine, plan.texture):
        assert stage.compute.device == chosen.device
    demo = demo_plan(train_parser(None).parse_flags(["--demo", "--gpu", "1"]), tmp_path)
    assert demo.vanilla.compute.device == chosen.device
    assert plan.coarse.compute.notes == ("computing on cuda:1",)
    assert "warp" in plan.coarse.compute.rasterizer_reason


def test_a_device_is_no_part_of_what_identifies_a_run(monkeypatch, tmp_path):
    flags = ["-s", str(tmp_path), "-r", "density", "--device"]
    here = full_plan(*flags, "cpu")
    chosen_gpu(monkeypatch)
    there = full_plan(*flags, "cuda")
    for stage in ("vanilla", "coarse"):
        assert getattr(here, stage).identity() == getattr(there, stage).identity()
    job = here.mesh.jobs[0]
    assert replace(here.mesh, use_vanilla_3dgs=True).identity(*job) == replace(
        there.mesh, use_vanilla_3dgs=True
    ).identity(*job)


def test_asking_for_a_rasterizer_without_a_gpu_is_an_error(capsys, tmp_path):
    code = run_cli(train.main, s=tmp_path, c="b", r="sdf", rasterizer="gsplat", device="cpu")
    assert code == 2
    assert "error: --rasterizer gsplat renders on CUDA devices only" in capsys.readouterr().err


def test_scripts_without_training_have_no_choice_of_rasterizer():
    assert parse(DeviceFlags, ["--device", "cpu"]).rasterizer is WARP
    assert Compute().device == torch.device("cpu")


def test_the_driver_says_which_cuda_it_supports(monkeypatch):
    class Driver:
        def cuDriverGetVersion(self, version):
            version._obj.value = 12_080
            return 0

    monkeypatch.setattr(device_module, "_driver_library", Driver)
    assert device_module.driver_cuda_version() == (12, 8)
    monkeypatch.setattr(device_module, "_driver_library", lambda: None)
    assert device_module.driver_cuda_version() is None
