# SPDX-License-Identifier: Apache-2.0
"""Several processes train what one process trains, and end together when one of them fails."""

import os
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from PIL import Image

import train
import train_refined
from gaussian_splatting import train as vanilla_train
from gaussian_splatting.core.random import derive_seed, draw_labels
from gaussian_splatting.engine import memory_plan
from gaussian_splatting.engine.component import NO_RULES, ViewResult
from gaussian_splatting.engine.memory_plan import MemoryOptions
from gaussian_splatting.engine.stepping import RunContext, Stepper
from gaussian_splatting.optim.adam import GroupedAdam
from gaussian_splatting.optim.optimizer_config import OptimizerConfig
from gaussian_splatting.rasterization import compute
from gaussian_splatting.rasterization.compute import BackendFlags, DeviceFlags
from gaussian_splatting.vanilla.vanilla_run import vanilla_parser
from sugar_scene.triangle_mesh import write_mesh_ply
from sugar_utils import device
from sugar_utils.console import Console
from sugar_utils.device import CudaFacts, Gpu
from sugar_utils.errors import TrainingError, UserError
from sugar_utils.process_group import ALONE, ProcessGroup
from sugar_utils.settings import from_args
from sugar_utils.torchrun import Launch
from tests.support.brief_runs import coarse_flags, vanilla_flags
from tests.support.command_line import WITHOUT_VALUE, as_flags, free_port
from tests.support.mesh_scenes import icosahedron
from tests.support.tiny_scene import (
    REPOSITORY,
    assert_same_bits,
    finish,
    make_tiny_scene,
    refusal,
    run_cli,
    tiny_cameras,
    wait_for_checkpoint,
)
from tests.support.warm_processes import WarmProcess

TORCHRUN = {
    "RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "1",
}


def environments_of_ranks(n: int) -> list[dict[str, str]]:
    """Variables that torchrun gives to each of ``n`` processes."""
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    common |= {"WORLD_SIZE": n, "OMP_NUM_THREADS": 1}
    variables = [{**common, "RANK": rank, "LOCAL_RANK": rank} for rank in range(n)]
    return [{name: str(value) for name, value in each.items()} for each in variables]


def start_ranks(n: int, script: str, *flags: object) -> list[WarmProcess]:
    """Start an entry point in ``n`` processes, as torchrun does."""
    words = [str(flag) for flag in flags]
    return [WarmProcess(script, words, env=env) for env in environments_of_ranks(n)]


def run_ranks(n: int, script: str, *flags: object) -> list[tuple[int, str, str]]:
    """Exit code, standard output and standard error of each process."""
    return [finish(process) for process in start_ranks(n, script, *flags)]


@pytest.fixture
def launched(monkeypatch):
    """This process as the second of four."""
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)


def vanilla_args(*words: str):
    return vanilla_parser(None).parse_flags(["-s", "scene", "-m", "out", *words])


@dataclass
class Model:
    """Three Gaussians."""

    optimizer: GroupedAdam
    device: torch.device = torch.device("cpu")

    def __len__(self):
        return 3


class Pull:
    """A stage with one parameter; the gradient of a view is the number of its camera."""

    name = "pull"
    components = ()
    memory_plan = None
    further_images = None
    extent = 1.0

    def __init__(self, views_per_step: int) -> None:
        tensors = {"log_scales": torch.zeros(3, 3)}
        config = OptimizerConfig(views_per_step=views_per_step)
        optimizer = GroupedAdam(tensors, {"log_scales": 0.1}, config)
        self.seen: list[tuple[int, int, str]] = []
        self.gradients: list[float] = []
        self.model = Model(optimizer)

    def begin(self, iteration):
        pass

    def rules(self, iteration):
        return NO_RULES

    def step_statistics(self):
        return []

    def commit(self, result):
        pass

    note = commit

    def accumulate(self, view, resources):
        camera, view_index = view.camera, view.index
        number = int(camera.name[5:7])
        self.seen.append((view.iteration, view_index, camera.name))
        self.model.optimizer.parameters["log_scales"].grad = torch.full((3, 3), float(number))
        terms = {"loss": torch.tensor(float(number))}
        if view_index == 1:
            terms["rare"] = torch.tensor(1.0)
        radii = (torch.arange(3) == view_index % 3).int()
        return ViewResult(view, terms, radii)

    def apply(self, iteration):
        gradient = self.model.optimizer.parameters["log_scales"].grad
        self.gradients.append(float(gradient[0, 0]))
        self.model.optimizer.zero_grad()


def stepper_of(stage: Pull, group: ProcessGroup = ALONE) -> Stepper:
    images = SimpleNamespace(
        get=lambda camera: torch.zeros(1), prefetch=lambda camera: None, serve=lambda device: None
    )
    return Stepper(
        stage,
        tiny_cameras(10),
        RunContext(images, Console.silent(), group),
        first=1,
        seed=0,
    )


def test_photographs_come_in_the_same_order_for_any_number_of_processes():
    alone = stepper_of(Pull(1))
    expected = [alone.camera(iteration).name for iteration in range(1, 25)]
    for views, size in ((2, 1), (4, 2), (4, 4), (6, 3)):
        places = []
        for rank in range(size):
            stepper = stepper_of(Pull(views), ProcessGroup(rank, size))
            for iteration in range(1, 1 + 24 // views):
                for view_index in ProcessGroup(rank, size).share(views):
                    place = (iteration - 1) * views + view_index
                    places.append((place, stepper.camera(iteration, view_index).name))
        assert [name for _, name in sorted(places)] == expected


def test_a_step_takes_the_mean_over_its_views():
    stage = Pull(4)
    stepper = stepper_of(stage)
    total = stepper.step(1, "SIGTERM")
    numbers = [int(name[5:7]) for _, _, name in stage.seen]
    assert [(iteration, view_index) for iteration, view_index, _ in stage.seen] == [
        (1, s) for s in range(4)
    ]
    assert len(set(numbers)) == 4
    assert stage.gradients == [sum(numbers) / 4]
    assert float(total.terms["loss"]) == sum(numbers) / 4
    assert float(total.terms["rare"]) == 0.25
    assert total.stop == "SIGTERM"
    # Ten views: the third step is the first to see one again.
    stepper.step(2, None)
    assert len({name for _, _, name in stage.seen}) == 8
    assert (stepper.epoch(3), stepper.epoch(4)) == (0, 1)


def test_the_first_view_of_a_step_has_the_draws_of_a_step_of_one_view():
    assert derive_seed(3, "samples", *draw_labels(7, 0)) == derive_seed(3, "samples", 7)
    others = {derive_seed(3, "samples", *draw_labels(i, s)) for i in range(9) for s in range(9)}
    assert len(others) == 81


def test_one_view_per_step_leaves_the_identity_as_it_was():
    assert OptimizerConfig().identity() == {}
    assert OptimizerConfig(views_per_step=2).identity() == {"views_per_step": 2}
    assert OptimizerConfig("bf16", views_per_step=3).identity() == {
        "optimizer_state": "bf16",
        "views_per_step": 3,
    }


def test_torchrun_is_recognised_by_all_of_its_variables():
    assert Launch.read({}) == Launch()
    assert Launch.read(TORCHRUN) == Launch(1, 4, 1, 2)
    assert Launch.read({"RANK": "1", "WORLD_SIZE": "4"}) == Launch()
    with pytest.raises(UserError, match="do not hold numbers"):
        Launch.read({**TORCHRUN, "RANK": "one"})


def test_views_per_step_follow_the_number_of_processes(launched):
    assert from_args(OptimizerConfig, vanilla_args()).views_per_step == 4
    assert from_args(OptimizerConfig, vanilla_args("--views_per_step", "8")).views_per_step == 8
    with pytest.raises(UserError, match="--views_per_step 6: 4 processes cannot share them"):
        from_args(OptimizerConfig, vanilla_args("--views_per_step", "6"))


def test_only_the_first_process_prints_errors_that_all_know(
    launched, monkeypatch, capsys, tmp_path
):
    monkeypatch.setattr("sugar_utils.entrypoint._SILENT_SECONDS", 0.0)
    assert run_cli(vanilla_train.main, "--no_such_flag", 1) == 2
    assert run_cli(vanilla_train.main, "-s", tmp_path, "-m", "b", "--views_per_step", 3) == 2
    assert capsys.readouterr().err == ""
    monkeypatch.setenv("RANK", "0")
    assert run_cli(vanilla_train.main, "-s", tmp_path, "-m", "b", "--views_per_step", 3) == 2
    assert capsys.readouterr().err.startswith("error: --views_per_step 3")


def test_a_single_process_meets_nobody():
    values = torch.tensor([1.0, 2.0])
    ALONE.sum_(values)
    ALONE.broadcast_(values)
    ALONE.barrier()
    ALONE.check_same([values], 1)
    assert values.tolist() == [1.0, 2.0]
    assert ALONE.all_gather_numbers([1, 2]) == [[1, 2]]
    assert (ALONE.all_gather("a"), ALONE.broadcast("b"), ALONE.share(3)) == (["a"], "b", range(3))


class Differing(ProcessGroup):
    """The first of two processes; the other one answers every collective call with one more."""

    def __init__(self) -> None:
        super().__init__(0, 2)

    def all_gather_numbers(self, numbers):
        return [list(numbers), [number + 1 for number in numbers]]


def test_processes_that_no_longer_agree_stop():
    with pytest.raises(TrainingError, match="no longer hold the same Gaussians at iteration 5"):
        Differing().check_same([torch.zeros(3), torch.zeros(2, dtype=torch.bfloat16)], 5)
    stepper = stepper_of(Pull(2), Differing())
    with pytest.raises(TrainingError, match=r"different numbers of Gaussians .* \(3, 4\)"):
        stepper.step(1, None)


def test_each_process_takes_the_gpu_of_its_own_number(launched, monkeypatch):
    gpus = (Gpu("A", (8, 6)), Gpu("B", (8, 9)))
    facts = CudaFacts(True, "13.0", ("sm_86", "sm_89"), gpus, warp_gpus=2)
    monkeypatch.setattr(compute, "cuda_facts", lambda: facts)
    monkeypatch.setattr(device, "cuda_facts", lambda: facts)
    monkeypatch.setattr(ProcessGroup, "join", lambda launch, cuda: ProcessGroup(launch.rank, 1))
    happened = []
    monkeypatch.setattr(torch.cuda, "set_device", happened.append)
    choose = compute.choose_rasterizer
    monkeypatch.setattr(
        compute, "choose_rasterizer", lambda *a: (happened.append("rasterizer"), choose(*a))[1]
    )
    assert from_args(BackendFlags, vanilla_args()).device == torch.device("cuda", 1)
    # Before anything computes there: pinned memory would open a context on the first GPU.
    assert happened == [torch.device("cuda", 1), "rasterizer"]
    with pytest.raises(UserError, match="--gpu 0: each of the 4 processes takes the GPU"):
        from_args(BackendFlags, vanilla_args("--gpu", "0"))
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(UserError, match="--gpu 2: there is no such CUDA device"):
        from_args(BackendFlags, vanilla_args())


def test_scripts_that_do_not_train_refuse_torchrun(launched):
    with pytest.raises(UserError, match="works in one process"):
        DeviceFlags(device="cpu").choose()


def test_processes_share_the_memory_of_a_cpu(monkeypatch):
    monkeypatch.setattr(memory_plan, "available_bytes", lambda device: 1000)
    cpu, cuda = torch.device("cpu"), torch.device("cuda", 0)
    assert memory_plan.usable_bytes(MemoryOptions(sharers=4), cpu, 0) == 200
    assert memory_plan.usable_bytes(MemoryOptions(sharers=4), cuda, 0) == 800


def kinds(scene, checkpoint, folder: Path) -> dict[str, tuple]:
    """Script, entry point and flags (the last one names the output) of short runs."""
    mesh = folder / "sugarmesh_ball.ply"
    write_mesh_ply(mesh, icosahedron())
    return {
        "vanilla": (
            "gaussian_splatting/train.py",
            vanilla_train.main,
            (
                *vanilla_flags(
                    scene.root,
                    iterations=12,
                    densify_until_iter=10,
                    opacity_reset_interval=6,
                    random_background=WITHOUT_VALUE,
                    max_gaussians=350,
                    checkpoint_interval=4,
                ),
                "-m",
            ),
        ),
        "coarse": (
            "train.py",
            train.main,
            (
                *coarse_flags(
                    scene.root,
                    checkpoint,
                    schedule_scale=0.002,
                    sdf_samples=400,
                    checkpoint_interval=99_999,
                    use_bfloat16=WITHOUT_VALUE,
                    checkpoint_milestones=(8_000, 10_000),
                ),
                "--output_dir",
            ),
        ),
        "multiview": (
            "train.py",
            train.main,
            (
                *coarse_flags(
                    scene.root,
                    checkpoint,
                    r="multiview",
                    schedule_scale=0.002,
                    sdf_samples=None,
                    multiview_pixels=500,
                    max_gaussians=250,
                    checkpoint_interval=10_000,
                    checkpoint_milestones=99_999,
                ),
                "--output_dir",
            ),
        ),
        "refine": (
            "train_refined.py",
            train_refined.main,
            (
                *as_flags(
                    s=scene.root,
                    c=checkpoint,
                    m=mesh,
                    g=6,
                    v=1000,
                    f=8,
                    exposure_compensation=WITHOUT_VALUE,
                    checkpoint_interval=4,
                ),
                "-o",
            ),
        ),
    }


def checkpoints(output: Path) -> list[Path]:
    """From the first to the last."""
    return sorted(output.rglob("*.pt"), key=lambda path: int(path.stem))


def assert_same_runs(a: Path, b: Path, n: int) -> None:
    files = checkpoints(a)
    assert len(files) == n
    for file in files:
        assert_same_bits(file, b / file.relative_to(a))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "n"), [("vanilla", 3), ("coarse", 3), ("multiview", 2)])
def test_two_processes_are_one_with_two_views_per_step(name, n, scene, checkpoint, tmp_path):
    if name == "multiview":
        # So many views that they have neighbours.
        scene = make_tiny_scene(tmp_path / "many", 40)
    script, main, flags = kinds(scene, checkpoint, tmp_path)[name]
    one, two = tmp_path / "one", tmp_path / "two"
    (first, out, _), (second, silence, _) = run_ranks(2, script, *flags, two)
    assert (first, second) == (0, 0)
    assert "2 processes share the views of each step" in out
    assert silence == ""
    assert run_cli(main, *flags, one, "--views_per_step", 2) == 0
    assert_same_runs(one, two, n)
    # What two processes began, one goes on with.
    checkpoints(two)[-1].unlink()
    assert run_cli(main, *flags, two, "--views_per_step", 2) == 0
    assert_same_runs(one, two, n)


def masks_of(scene, folder: Path) -> Path:
    """Masks that leave out the left quarter of each view."""
    folder.mkdir()
    for camera in scene.cameras:
        mask = Image.new("L", (camera.width, camera.height))
        mask.paste(255, (camera.width // 4, 0, camera.width, camera.height))
        mask.save(folder / camera.name)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "preset"), [("object", None), ("ignore", "fast")])
def test_two_processes_are_one_with_masks_and_score_and_grow_like_it(
    mode, preset, scene, checkpoint, tmp_path
):
    """Random backgrounds are those of the view, whichever process renders it."""
    script, main, flags = kinds(scene, checkpoint, tmp_path)["vanilla"]
    masked = as_flags(masks=masks_of(scene, tmp_path / "masks"), mask_mode=mode, preset=preset)
    flags = (*masked, *flags)
    one, two = tmp_path / "one", tmp_path / "two"
    assert [code for code, *_ in run_ranks(2, script, *flags, two)] == [0, 0]
    assert run_cli(main, *flags, one, "--views_per_step", 2) == 0
    assert_same_runs(one, two, 3)
    if preset == "fast":
        stage = torch.load(checkpoints(one)[0])["resume"]["stage"]
        assert {"pruning_scores", "gaussian_budget"} <= stage.keys()


@pytest.mark.slow
def test_two_processes_go_on_with_what_one_began(scene, checkpoint, tmp_path, capsys):
    script, main, flags = kinds(scene, checkpoint, tmp_path)["refine"]
    one, two = tmp_path / "one", tmp_path / "two"
    assert run_cli(main, *flags, one, "--views_per_step", 2) == 0
    shutil.copytree(one, two)
    checkpoints(two)[-1].unlink()
    ends = run_ranks(2, script, *flags, two)
    assert [code for code, _, _ in ends] == [0, 0]
    assert "continuing after iteration 4 of" in ends[0][1]
    assert_same_runs(one, two, 2)
    # One view per step is another run.
    assert "views_per_step: 2 → (not set)" in refusal(capsys, main, *flags, two)


def long_run(scene, output: Path) -> list[WarmProcess]:
    processes = start_ranks(
        2,
        "gaussian_splatting/train.py",
        "-s",
        scene.root,
        "-m",
        output,
        "--iterations",
        100_000,
        "--checkpoint_interval",
        5,
        "--densify_from_iter",
        100_000,
    )
    folder = output / "checkpoints"
    folder.mkdir(parents=True)
    wait_for_checkpoint(processes[0], folder, 0, limit=60, linger=0.2)
    return processes


@pytest.mark.slow
def test_a_killed_process_ends_the_others_with_one_line(scene, tmp_path):
    processes = long_run(scene, tmp_path / "out")
    processes[1].kill()
    code, _, err = finish(processes[0], timeout=20)
    finish(processes[1])
    assert code == 4
    assert err.startswith("error: another process of this run exited unexpectedly")
    assert err.count("\n") == 1


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="sends POSIX signals")
def test_a_request_to_stop_that_one_process_got_stops_all_in_one_iteration(scene, tmp_path):
    output = tmp_path / "out"
    processes = long_run(scene, output)
    processes[1].send_signal(signal.SIGTERM)
    ends = [finish(process, timeout=20) for process in processes]
    assert [code for code, _, _ in ends] == [143, 143]
    said = "".join(err for _, _, err in ends)
    assert said.startswith("stopped: SIGTERM after iteration ")
    assert said.count("\n") == 1
    assert f"saved as {checkpoints(output)[-1]};" in said
    assert "continue with: torchrun --nproc_per_node=2 " in said


@pytest.mark.slow
def test_an_error_of_one_process_is_said_once_and_ends_all(scene, tmp_path):
    spoiled = tmp_path / "scene"
    shutil.copytree(scene.root, spoiled)
    # One that is damaged would be left out.
    for path in (spoiled / "images").iterdir():
        path.write_bytes(b"no picture")
    script = REPOSITORY / "gaussian_splatting" / "train.py"
    flags = as_flags(s=spoiled, m=tmp_path / "out", iterations=100)
    command = [sys.executable, *map(str, (script, *flags))]
    # The store of the first process has to last until the other one has read it: the end of a
    # process that loaded its libraries itself takes longer than that.
    processes = []
    for env in environments_of_ranks(2):
        process = subprocess.Popen(
            command,
            cwd=REPOSITORY,
            env={**os.environ, **env},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            encoding="utf-8",
        )
        processes.append(process)
    ends = [finish(process) for process in processes]
    assert [code for code, _, _ in ends] == [2, 2]
    said = "".join(err for _, _, err in ends)
    assert said.startswith("error: ")
    assert "no training cameras are left" in said
    assert said.count("\n") == 1
