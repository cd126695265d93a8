# SPDX-License-Identifier: Apache-2.0
"""A run that is stopped at any moment and started again ends with the bits of one that was not."""

import json
import os
import random
import re
import shlex
import shutil
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import train
import train_refined
from gaussian_splatting import train as vanilla_train
from gaussian_splatting.vanilla.vanilla_stage import VanillaStage
from sugar_scene.triangle_mesh import write_mesh_ply
from sugar_trainers.coarse_stage import CoarseStage
from sugar_trainers.refine_stage import RefineStage
from tests.support.brief_runs import coarse_flags, vanilla_flags
from tests.support.command_line import WITHOUT_VALUE, as_flags
from tests.support.mesh_scenes import icosahedron
from tests.support.tiny_scene import (
    REPOSITORY,
    TinyScene,
    assert_refused,
    assert_same_bits,
    events,
    finish,
    kill,
    load_pt,
    newest,
    run_cli,
    start,
    wait_for_checkpoint,
)

COARSE_FOLDER = "sugarcoarse_3Dgs7000_densityestim02_sdfnorm02"


@dataclass(frozen=True)
class Kind:
    """One kind of run, short enough for tests.

    Attributes:
        script: Its entry point.
        main: The same as a function.
        stage: Its stage class.
        flags: Everything but the output.
        output_flag: The flag that says where to write.
        folder: Where its checkpoints lie below that.
        saved: Iterations with checkpoints, which all are kept.
    """

    script: str
    main: Callable[[], None]
    stage: type
    flags: tuple[object, ...]
    output_flag: str
    folder: Path
    saved: tuple[int, ...]

    def command(self, output: Path, *more: object) -> list[object]:
        return [*self.flags, self.output_flag, output, *more]

    def run(self, output: Path, *more: object) -> int:
        return run_cli(self.main, *self.command(output, *more))

    @property
    def last(self) -> int:
        return self.saved[-1]


def vanilla(scene: TinyScene, iterations: int, interval: int, *more: object) -> Kind:
    """Densification at multiples of 4, an opacity reset at 6 and 12, random backgrounds."""
    flags = (
        *vanilla_flags(
            scene.root,
            iterations=iterations,
            densify_until_iter=iterations - 2,
            opacity_reset_interval=6,
            random_background=WITHOUT_VALUE,
            max_gaussians=500,
            checkpoint_interval=interval,
            save_iterations=1,
            test_iterations=1,
        ),
        *more,
    )
    saved = tuple(range(interval, iterations + 1, interval))
    folder = Path("checkpoints")
    script = "gaussian_splatting/train.py"
    return Kind(script, vanilla_train.main, VanillaStage, flags, "-m", folder, saved)


def coarse(scene: TinyScene, source: Path, scale: float, mode: str, saved, *more: object) -> Kind:
    """Iterations 7000 to 15000 times the scale; ``saved`` are iterations of the short schedule."""
    milestones = [round(iteration / scale) for iteration in saved]
    flags = (
        *coarse_flags(
            scene.root,
            source,
            r=mode,
            schedule_scale=scale,
            sdf_samples=400,
            checkpoint_interval=99_999,
            test_iterations=1,
        ),
        "--checkpoint_milestones",
        *(milestones or ["[]"]),
        *more,
    )
    name = COARSE_FOLDER.replace("density", "sdf") if mode == "sdf" else COARSE_FOLDER
    folder = Path("coarse") / "scene" / name
    return Kind("train.py", train.main, CoarseStage, flags, "--output_dir", folder, tuple(saved))


def refine(scene: TinyScene, source: Path, iterations: int, interval: int, *more: object) -> Kind:
    """Six Gaussians on each triangle of a ball."""
    mesh = source.parent / "sugarmesh_ball.ply"
    if not mesh.exists():
        write_mesh_ply(mesh, icosahedron())
    flags = (
        *as_flags(
            s=scene.root, c=source, m=mesh, g=6, v=1000, f=iterations, checkpoint_interval=interval
        ),
        *more,
    )
    saved = tuple(range(interval, iterations + 1, interval))
    folder = Path("sugarfine_ball_normalconsistency01_gaussperface6")
    return Kind("train_refined.py", train_refined.main, RefineStage, flags, "-o", folder, saved)


@pytest.fixture(scope="module", params=["vanilla", "coarse", "refine"])
def kind(request, scene, checkpoint) -> Kind:
    if request.param == "vanilla":
        return vanilla(scene, 13, 1, "--keep_checkpoints", 99)
    if request.param == "refine":
        return refine(scene, checkpoint, 12, 1, "--keep_checkpoints", 99)
    # 27 is the last before the prune; neighbours are searched at 28 and every even iteration.
    return coarse(scene, checkpoint, 0.003, "dn_consistency", (24, 27, 28, 31, 45))


@pytest.fixture(scope="module")
def straight(kind, tmp_path_factory) -> Path:
    """Output of the uninterrupted run."""
    output = tmp_path_factory.mktemp("straight")
    assert kind.run(output) == 0
    return output


def rewind(kind: Kind, straight: Path, output: Path, *iterations: int) -> Path:
    """Return the folder that a killed run with these checkpoints leaves."""
    source, target = straight / kind.folder, output / kind.folder
    target.mkdir(parents=True)
    for iteration in iterations:
        shutil.copy(source / f"{iteration}.pt", target)
    record = json.loads((source / "run.json").read_text(encoding="utf-8"))
    record["status"] = "running"
    (target / "run.json").write_text(json.dumps(record), encoding="utf-8")
    return target


def assert_same_result(kind: Kind, straight: Path, output: Path) -> None:
    final = kind.folder / f"{kind.last}.pt"
    assert_same_bits(straight / final, output / final)
    for ply in straight.rglob(f"iteration_{kind.last}/*.ply"):
        assert ply.read_bytes() == (output / ply.relative_to(straight)).read_bytes()


@pytest.mark.parametrize("is_third", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_run_continued_from_any_checkpoint_ends_with_the_same_bits(
    kind, straight, tmp_path, capsys, is_third
):
    """Every third checkpoint, and all others."""
    unfinished = kind.saved[:-1]
    thirds = unfinished[::-3]
    for iteration in unfinished:
        if (iteration in thirds) != is_third:
            continue
        output = tmp_path / str(iteration)
        rewind(kind, straight, output, iteration)
        assert kind.run(output) == 0
        assert f"continuing after iteration {iteration} of" in capsys.readouterr().out
        assert_same_result(kind, straight, output)


def stop_at(monkeypatch, kind: Kind, iteration: int, name: str) -> None:
    """Have this process receive a signal in the middle of an iteration, once."""
    original, pending = kind.stage.accumulate, [iteration]

    def accumulate(self, view, resources):
        if pending and view.iteration == pending[0]:
            pending.clear()
            os.kill(os.getpid(), getattr(signal, name))
        return original(self, view, resources)

    monkeypatch.setattr(kind.stage, "accumulate", accumulate)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGTERM", 143)])
def test_signal_saves_the_iteration_and_prints_how_to_go_on(
    kind, straight, tmp_path, monkeypatch, capsys, name, code
):
    stopped = kind.saved[1] + 1
    stop_at(monkeypatch, kind, stopped, name)
    assert kind.run(tmp_path) == code
    message = capsys.readouterr().err
    saved = tmp_path / kind.folder / f"{stopped}.pt"
    assert saved.is_file()
    assert message.count("\n") == 1
    assert f"{name} after iteration {stopped}, saved as {saved}" in message
    words = shlex.split(message.split("continue with: ")[1])
    assert words[1:] == ["train.py", *map(str, kind.command(tmp_path))]
    assert run_cli(kind.main, *words[2:]) == 0
    assert_same_result(kind, straight, tmp_path)


@pytest.mark.slow
def test_command_to_go_on_does_not_fall_back_to_an_explicit_checkpoint(
    kind, straight, tmp_path, monkeypatch, capsys
):
    source = straight / kind.folder / f"{kind.saved[0]}.pt"
    stopped = kind.saved[1]
    stop_at(monkeypatch, kind, stopped, "SIGTERM")
    assert kind.run(tmp_path, "--resume", source) == 143
    words = shlex.split(capsys.readouterr().err.split("continue with: ")[1])
    assert words[-2:] == ["--resume", str(tmp_path / kind.folder / f"{stopped}.pt")]
    assert run_cli(kind.main, *words[2:]) == 0
    assert f"continuing after iteration {stopped} of" in capsys.readouterr().out
    assert_same_result(kind, straight, tmp_path)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 3] ^= 1
    path.write_bytes(content)


@pytest.mark.slow
@pytest.mark.parametrize("damage", [truncate, flip_a_bit, lambda path: path.write_bytes(b"")])
def test_damaged_checkpoint_is_named_and_the_one_before_is_used(
    kind, straight, tmp_path, capsys, damage
):
    before, newest_one = kind.saved[0], kind.saved[1]
    folder = rewind(kind, straight, tmp_path, before, newest_one)
    damage(folder / f"{newest_one}.pt")
    assert kind.run(tmp_path) == 0
    out = capsys.readouterr().out
    assert re.search(rf"{newest_one}\.pt: .*damaged.*the checkpoint before it is tried", out)
    assert f"continuing after iteration {before} of" in out
    assert_same_result(kind, straight, tmp_path)


@pytest.mark.slow
def test_run_whose_checkpoints_are_all_damaged_starts_anew(kind, straight, tmp_path, capsys):
    folder = rewind(kind, straight, tmp_path, kind.saved[0])
    truncate(folder / f"{kind.saved[0]}.pt")
    assert kind.run(tmp_path) == 0
    assert "damaged" in capsys.readouterr().out
    assert_same_result(kind, straight, tmp_path)


@pytest.mark.slow
def test_run_that_lost_its_checkpoints_does_not_double_its_curves(kind, straight, tmp_path):
    shutil.copytree(straight, tmp_path / "again")
    folder = tmp_path / "again" / kind.folder
    for path in folder.glob("*.pt"):
        path.unlink()
    assert kind.run(tmp_path / "again") == 0
    steps = [event.step for event in events(folder).Scalars("Loss/loss")]
    assert steps == sorted(set(steps))
    assert_same_result(kind, straight, tmp_path / "again")


def snapshot(root: Path) -> dict[str, tuple[int, bytes]]:
    """Times and contents of all files but the log."""
    return {
        path.relative_to(root).as_posix(): (path.stat().st_mtime_ns, path.read_bytes())
        for path in root.rglob("*")
        if path.is_file() and path.name != "log.txt"
    }


def test_finished_run_is_skipped(kind, straight, capsys):
    before = snapshot(straight)
    assert kind.run(straight) == 0
    lines = capsys.readouterr().out.splitlines()
    result = {"-m": Path("point_cloud") / f"iteration_{kind.last}" / "point_cloud.ply"}.get(
        kind.output_flag, kind.folder / f"{kind.last}.pt"
    )
    assert f"finished already: {straight / result}" in lines
    assert snapshot(straight) == before


def test_other_settings_are_listed_and_refused(kind, straight, capsys):
    before = snapshot(straight)
    code = (
        kind.run(straight, "--random_seed", 5, "--white_background", True)
        if (kind.output_flag != "-m")
        else kind.run(straight, "--random_seed", 5, "-w")
    )
    assert_refused(
        code,
        capsys.readouterr().err,
        str(straight / kind.folder),
        "--random_seed unset -> 5",
        "--white_background unset -> True",
        kind.output_flag,
        "--overwrite True",
    )
    assert snapshot(straight) == before


def test_resume_none_refuses_an_occupied_folder(kind, straight, capsys):
    before = snapshot(straight)
    code = kind.run(straight, "--resume", "none")
    assert_refused(code, capsys.readouterr().err, "--resume none", "--overwrite True")
    assert snapshot(straight) == before


@pytest.mark.slow
def test_resume_none_with_overwrite_starts_anew(kind, straight, tmp_path, capsys):
    rewind(kind, straight, tmp_path, kind.saved[1])
    assert kind.run(tmp_path, "--resume", "none", "--overwrite", True) == 0
    assert "continuing" not in capsys.readouterr().out
    assert_same_result(kind, straight, tmp_path)


@pytest.mark.slow
def test_explicit_checkpoint_continues_under_other_settings_with_a_notice(
    kind, straight, tmp_path, capsys
):
    source = straight / kind.folder / f"{kind.saved[0]}.pt"
    assert kind.run(tmp_path, "--resume", source, "--random_seed", 5) == 0
    out = capsys.readouterr().out
    assert "continuing with another setting than the checkpoint's: random_seed: 0 → 5" in out
    assert f"continuing after iteration {kind.saved[0]} of {source}" in out
    assert (tmp_path / kind.folder / f"{kind.last}.pt").is_file()


@pytest.mark.slow
def test_checkpoint_of_the_original_program_is_continued(kind, straight, tmp_path, capsys):
    payload = load_pt(straight / kind.folder / f"{kind.saved[0]}.pt")
    del payload["resume"]
    torch.save(payload, tmp_path / "foreign.pt")
    assert kind.run(tmp_path / "out", "--resume", tmp_path / "foreign.pt") == 0
    out = capsys.readouterr().out
    assert "foreign.pt does not tell the settings it was made with" in out
    assert "continuing with another setting" not in out
    assert (tmp_path / "out" / kind.folder / f"{kind.last}.pt").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("what", ["finished", "absent", "damaged"])
def test_explicit_checkpoint_that_cannot_be_continued_is_refused(
    kind, straight, tmp_path, capsys, what
):
    source = tmp_path / f"{kind.last}.pt"
    if what != "absent":
        shutil.copy(straight / kind.folder / source.name, source)
    if what == "damaged":
        truncate(source)
    code = kind.run(tmp_path / "out", "--resume", source)
    reason = {"finished": "nothing is left", "absent": "cannot be read", "damaged": "damaged"}
    assert_refused(code, capsys.readouterr().err, str(source), reason[what])
    assert not list((tmp_path / "out").rglob("*.pt"))


def test_checkpoint_of_another_stage_is_refused(scene, checkpoint, tmp_path, capsys):
    short = vanilla(scene, 4, 2)
    assert short.run(tmp_path / "vanilla") == 0
    long = coarse(scene, checkpoint, 0.003, "density", ())
    code = long.run(tmp_path / "coarse", "--resume", tmp_path / "vanilla/checkpoints/2.pt")
    assert_refused(code, capsys.readouterr().err, "is of iteration 2", "from 21 to 45")


@pytest.mark.slow
def test_density_and_dn_consistency_do_not_replace_each_other(scene, checkpoint, tmp_path, capsys):
    first = coarse(scene, checkpoint, 0.0003, "density", ())
    second = coarse(scene, checkpoint, 0.0003, "dn_consistency", ())
    assert first.run(tmp_path) == 0
    before = snapshot(tmp_path)
    code = second.run(tmp_path)
    assert_refused(
        code,
        capsys.readouterr().err,
        "--regularization_type density -> dn_consistency",
        "--output_dir",
        "--overwrite True",
    )
    assert snapshot(tmp_path) == before
    assert second.run(tmp_path, "--overwrite", True) == 0
    record = json.loads((tmp_path / second.folder / "run.json").read_text(encoding="utf-8"))
    assert record["settings"]["regularization_type"] == "dn_consistency"
    assert record["status"] == "finished"
    assert "regularization              density" not in (
        tmp_path / second.folder / "log.txt"
    ).read_text(encoding="utf-8")


def test_only_as_many_checkpoints_as_asked_for_are_kept(scene, tmp_path):
    kind = vanilla(
        scene, 11, 2, "--keep_checkpoints", 2, "--checkpoint_iterations", 3, "--test_iterations", 9
    )
    assert kind.run(tmp_path) == 0
    stored = {path.name for path in (tmp_path / "checkpoints").glob("*.pt")}
    assert stored == {"3.pt", "8.pt", "10.pt", "11.pt"}


def long_kind(name: str, scene: TinyScene, checkpoint: Path) -> Kind:
    """A run that is long enough to be killed in the middle."""
    if name == "vanilla":
        return vanilla(scene, 120, 5)
    saved = (*range(73, 150, 6), 150)
    return coarse(scene, checkpoint, 0.01, "dn_consistency", saved)


@pytest.fixture(scope="module")
def straight_coarse(scene, checkpoint, tmp_path_factory) -> Path:
    """Output of the long run of the coarse stage that nothing interrupted."""
    output = tmp_path_factory.mktemp("straight_coarse")
    assert long_kind("coarse", scene, checkpoint).run(output) == 0
    return output


@pytest.mark.slow
@pytest.mark.parametrize("name", ["vanilla", "coarse"])
def test_run_killed_again_and_again_ends_with_the_same_bits(
    scene, checkpoint, tmp_path, capsys, request, name
):
    kind = long_kind(name, scene, checkpoint)
    broken = tmp_path / "broken"
    if name == "coarse":
        straight = request.getfixturevalue("straight_coarse")
    else:
        straight = tmp_path / "straight"
        assert kind.run(straight) == 0
    moments = random.Random(7)
    hits = 0
    folder = broken / kind.folder
    # The limit has the second process killed while it starts.
    for limit in (60.0, 2.0, 60.0):
        process = start(kind.script, *kind.command(broken))
        wait_for_checkpoint(
            process, folder, newest(folder), limit=limit, linger=moments.uniform(0, 0.15)
        )
        hits += process.poll() is None
        kill(process)
    assert hits >= 2
    assert newest(folder) >= 0
    capsys.readouterr()
    assert kind.run(broken) == 0
    said = capsys.readouterr()
    assert said.err == ""
    assert "continuing after iteration" in said.out or "finished already" in said.out
    assert_same_result(kind, straight, broken)
    assert not list(broken.rglob("*.tmp-*"))
    steps = [event.step for event in events(folder).Scalars("Loss/loss")]
    assert steps == [event.step for event in events(straight / kind.folder).Scalars("Loss/loss")]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no signals between processes")
@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGTERM", 143)])
def test_signal_to_a_process_saves_and_the_printed_command_finishes(
    scene, checkpoint, straight_coarse, tmp_path, capsys, name, code
):
    kind = long_kind("coarse", scene, checkpoint)
    process = start(kind.script, *kind.command(tmp_path))
    wait_for_checkpoint(process, tmp_path / kind.folder, -1, limit=60, linger=0)
    process.send_signal(getattr(signal, name))
    found, _, err = finish(process)
    assert found == code
    assert re.fullmatch(rf"\w+: {name} after iteration \d+, saved as .*\n", err)
    last = newest(tmp_path / kind.folder)
    assert f"after iteration {last}," in err
    words = shlex.split(err.split("continue with: ")[1])
    assert Path(words[1]) == REPOSITORY / kind.script
    assert run_cli(kind.main, *words[2:]) == 0
    assert f"continuing after iteration {last} of" in capsys.readouterr().out
    assert_same_result(kind, straight_coarse, tmp_path)
