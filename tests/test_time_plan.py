# SPDX-License-Identifier: Apache-2.0
"""``--minutes``: lengths of the stages from their speed, corrected between them, and kept."""

from __future__ import annotations

import contextlib
import json
from types import SimpleNamespace

import pytest

import train
from sugar_pipeline import commands
from sugar_pipeline.demo import demo_scene
from sugar_pipeline.pipeline.plan import PipelinePlan, plan_of
from sugar_pipeline.timing import lengths, one_run, stage_costs, time_plan
from sugar_pipeline.timing.stage_speed import Speed
from sugar_pipeline.timing.time_plan import ExpectedTimes, TimePlan
from sugar_utils.console import Console
from sugar_utils.errors import UserError
from tests.support.command_words import full_flags, full_plan
from tests.support.tiny_scene import (
    SHORT_PIPELINE,
    make_tiny_checkpoint,
    make_tiny_scene,
    refusal,
    run_cli,
)

MEGAPIXELS = 20 * 640 * 480 / 1e6
MULTIVIEW_STEPS = {"vanilla": 0.05, "coarse": 0.2, "refine": 0.25}


class Machine:
    """A clock, and a speed for each stage at 640 x 480 pixels, as large as images are.

    Meshes have as many triangles as are asked for, times ``n_meshes``.
    """

    def __init__(self, monkeypatch, n_meshes: int = 1, **seconds: float) -> None:
        self.now, self.seconds, self.timed = 0.0, MULTIVIEW_STEPS | seconds, []
        self.n_meshes = n_meshes
        self.n_triangles = 0
        monkeypatch.setattr(time_plan, "measure", self.measure)
        monkeypatch.setattr(stage_costs, "read_mesh_ply", self.read_mesh)
        clock = SimpleNamespace(monotonic=lambda: self.now)
        monkeypatch.setattr(time_plan, "time", clock)

    def read_mesh(self, path) -> SimpleNamespace:
        return SimpleNamespace(faces=range(self.n_triangles))

    def measure(self, options, images, least_work=0.0) -> Speed:
        name = {"VanillaOptions": "vanilla", "RefineOptions": "refine"}
        stage = name.get(type(options).__name__, "coarse")
        self.timed.append(stage)
        size = getattr(options, "size", None)
        share = min(1.0, (size.img_size_limit if size else 1920) / 640)
        width, height = round(640 * share), round(480 * share)
        return Speed(self.seconds[stage] * share**2, 20, width, height, MEGAPIXELS)

    def run(self, times: TimePlan, plan: PipelinePlan, slower: float = 1.0) -> PipelinePlan:
        """All stages, each as fast as it was when it was timed, or slower."""
        for stage in ("vanilla", "coarse", "mesh", "refine", "texture"):
            plan = times(stage, plan, None)
            loop = {
                "vanilla": lambda plan: plan.vanilla.config.iterations,
                "coarse": lambda plan: plan.coarse.loop.last - plan.coarse.loop.first,
                "refine": lambda plan: plan.refine.loop.last,
            }
            if stage == "mesh":
                self.n_triangles = self.n_meshes * plan.refine.config.n_vertices_in_fg
                plan.refine.mesh_path.parent.mkdir(parents=True, exist_ok=True)
                plan.refine.mesh_path.touch()
            if stage in loop:
                step = self.measure(getattr(plan, stage), None).seconds
                self.now += slower * step * loop[stage](plan)
            else:
                self.now += self.seconds_of(stage, plan)
        self.now += self.seconds_of("results", plan)
        return plan

    def seconds_of(self, stage: str, plan: PipelinePlan) -> float:
        """Of a mesh, its texture, or the results."""
        seconds = stage_costs.SECONDS_OF_TRIANGLE[stage] * self.n_triangles
        if stage == "results":
            return seconds + stage_costs.SECONDS_OF_RESULTS
        if stage == "texture":
            return seconds + stage_costs.SECONDS_OF_MEGAPIXEL * MEGAPIXELS
        share = 1 if plan.vanilla.size is None else 0.25
        return seconds + stage_costs.MULTIVIEW_COSTS[stage] * 20 * self.seconds["vanilla"] * share


def planned(tmp_path, *words: object, minutes: float = 15) -> tuple[TimePlan, PipelinePlan]:
    start = ["-s", "scans/cup", "-r", "multiview", "--minutes", minutes, "--output_dir", tmp_path]
    plan = full_plan(*start, *words)
    return TimePlan(plan, Console.silent()), plan


@pytest.mark.parametrize("n_meshes", [1, 2])
@pytest.mark.parametrize("minutes", [5, 15, 40])
def test_a_run_ends_in_time(minutes, n_meshes, tmp_path, monkeypatch):
    machine = Machine(monkeypatch, n_meshes)
    plan = machine.run(*planned(tmp_path, minutes=minutes))
    assert 0.8 * 60 * minutes <= machine.now <= 60 * minutes
    # Later stages read what earlier ones made.
    n = plan.vanilla.config.iterations
    assert plan.coarse.iteration_to_load == n
    assert plan.mesh.coarse_model_path == plan.coarse.result
    assert plan.texture.refined_model_path == plan.refine.result


def test_more_time_makes_longer_schedules_and_no_longer_ones_than_the_whole(tmp_path, monkeypatch):
    lengths = []
    for minutes in (15, 40, 10_000):
        machine = Machine(monkeypatch)
        plan = machine.run(*planned(tmp_path / str(minutes), minutes=minutes))
        lengths.append(
            (plan.vanilla.config.iterations, plan.coarse.loop.last, plan.refine.loop.last)
        )
    assert sorted(lengths) == lengths
    assert len(set(lengths)) == 3
    assert lengths[-1] == (7_000, 20_000, 15_000)


def test_a_machine_that_becomes_slower_gets_shorter_later_stages(tmp_path, monkeypatch):
    machine = Machine(monkeypatch)
    fast = machine.run(*planned(tmp_path / "a"))
    machine = Machine(monkeypatch)
    slow = machine.run(*planned(tmp_path / "b"), slower=1.6)
    assert slow.vanilla.config.iterations == fast.vanilla.config.iterations
    assert slow.coarse.loop.last < fast.coarse.loop.last
    assert slow.refine.loop.last < fast.refine.loop.last


def test_images_become_smaller_where_schedules_would_be_too_short(tmp_path, monkeypatch):
    Machine(monkeypatch)
    times, plan = planned(tmp_path, minutes=2)
    plan = times("vanilla", plan, None)
    assert plan.coarse.size.img_size_limit == 320
    assert plan.vanilla.size == plan.refine.size == plan.coarse.size


def test_a_refinement_that_would_be_too_short_leaves_its_time_to_the_others(tmp_path, monkeypatch):
    Machine(monkeypatch)
    _, plan = planned(tmp_path)
    speed = Speed(0.2, 20, 640, 480, MEGAPIXELS)
    pace = lengths.Pace.of("coarse", plan, speed)
    seconds = [lengths.seconds_of_stages("coarse", plan, pace, 60.0 * m) for m in (4, 15)]
    assert seconds[0]["refine"] == 0 < seconds[1]["refine"]
    for minutes, of_stages in zip((4, 15), seconds, strict=True):
        assert sum(of_stages.values()) == pytest.approx(60.0 * minutes)
    refinement = Speed(0.25, 20, 640, 480, MEGAPIXELS)
    n = [lengths.choose_length("refine", plan, refinement, pace, 60.0 * m) for m in (3, 30)]
    assert n[0] == 1
    assert n[1] >= lengths.ENOUGH["refine"]


@pytest.mark.parametrize(("minutes", "n_triangles"), [(10, 150_000), (40, 184_320)])
def test_meshes_suit_the_images_and_take_a_small_part_of_the_time(
    minutes, n_triangles, tmp_path, monkeypatch
):
    Machine(monkeypatch)
    times, plan = planned(tmp_path, minutes=minutes)
    plan = times("vanilla", plan, None)
    assert plan.mesh.decimation_targets == (n_triangles,)
    assert plan.refine.config.n_vertices_in_fg == n_triangles
    assert n_triangles <= 0.6 * 640 * 480
    assert 1.5 * n_triangles * sum(stage_costs.SECONDS_OF_TRIANGLE.values()) < 0.151 * 60 * minutes


@pytest.mark.parametrize(
    ("flags", "size", "triangles"),
    [(("-v", 1_000), 320, 1_000), (("--img_size_limit", 600), 600, 30_000)],
)
def test_what_is_given_is_not_chosen(flags, size, triangles, tmp_path, monkeypatch):
    Machine(monkeypatch)
    times, plan = planned(tmp_path, *flags, minutes=2)
    plan = times("vanilla", plan, None)
    assert plan.coarse.size.img_size_limit == size
    assert plan.mesh.decimation_targets == (triangles,)


def test_a_run_that_is_continued_keeps_what_was_chosen(tmp_path, monkeypatch):
    machine = Machine(monkeypatch)
    times, plan = planned(tmp_path)
    plan = times("coarse", times("vanilla", plan, None), None)
    machine.seconds = dict.fromkeys(machine.seconds, 9.0)
    machine.timed.clear()
    times, again = planned(tmp_path)
    again = times("coarse", times("vanilla", again, None), None)
    assert (again.vanilla, again.coarse) == (plan.vanilla, plan.coarse)
    assert machine.timed == []
    # Other flags, and a new start, are planned anew.
    for words in (("-v", 5_000), ("--resume", "none")):
        times, other = planned(tmp_path, *words)
        other = times("vanilla", other, None)
        assert other.vanilla.config.iterations < plan.vanilla.config.iterations


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--minutes", 0), "--minutes"),
        (("--minutes", "nan"), "--minutes"),
        (("--minutes", 5, "--schedule_scale", 0.1), "leave --schedule_scale out"),
        (("--minutes", 5, "--stop_after", "mesh"), "whole runs"),
    ],
)
def test_minutes_that_cannot_be_planned_are_refused_first(flags, said, tmp_path, capsys):
    scene = make_tiny_scene(tmp_path / "scene")
    checkpoint = make_tiny_checkpoint(tmp_path / "vanilla", scene)
    words = ("-s", scene.root, "-c", checkpoint, "-r", "density", *flags)
    assert said in refusal(capsys, train.main, *words, "--output_dir", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_without_minutes_the_expected_ones_are_told_once(tmp_path, monkeypatch, capsys):
    Machine(monkeypatch)
    plan = full_plan("-s", "scans/cup", "-r", "multiview", "--output_dir", tmp_path)
    times = ExpectedTimes(Console())
    for stage in ("vanilla", "coarse", "mesh", "refine", "texture"):
        assert times(stage, plan, None) is plan
    told = capsys.readouterr().out
    assert told.count("expected minutes: vanilla 7.0, coarse 41.6") == 1
    assert told.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_the_demo_can_be_planned(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(one_run, "run_stages", lambda *parts: seen.append(parts[0]))
    monkeypatch.setattr(demo_scene, "make_demo_scene", lambda *_, **__: None)
    assert run_cli(train.main, "--demo", "--minutes", 2, "--output_dir", tmp_path) == 0
    assert seen[0].flags["minutes"] == 2
    assert seen[0].coarse.scene_path == tmp_path / "demo_scene"


def test_the_doctor_says_what_would_be_chosen(tmp_path, capsys):
    scene = make_tiny_scene(tmp_path / "scene")
    checkpoint = make_tiny_checkpoint(tmp_path / "vanilla", scene)
    words = ("--doctor", "-s", scene.root, "-c", checkpoint, "--minutes", 1)
    assert run_cli(train.main, *words, "--output_dir", tmp_path / "out") == 0
    assert "iterations, " in capsys.readouterr().out
    assert not (tmp_path / "out").exists()


def run_with_minutes(tmp_path, monkeypatch, *words: object) -> list[str]:
    """The steps of a run from photographs, in order, up to its plan of time."""
    done: list[str] = []

    class Planned(Exception):
        pass

    def with_mode(plan, console):
        done.append("cameras")
        return plan_of(plan.flags.replaced(regularization_type="multiview"))

    def plan_time(plan, console, start):
        done.append("plan")
        done.append(f"began {time_plan.time.monotonic() - start:.0f} s before")
        raise Planned

    monkeypatch.setattr(one_run, "with_mode", with_mode)
    monkeypatch.setattr(one_run, "TimePlan", plan_time)
    scene = make_tiny_scene(tmp_path / "scene")
    flags = full_flags("-s", scene.root, "--minutes", 9, *words)
    with contextlib.suppress(Planned):
        commands.run_scene(flags, Console.silent())
    return done


def test_minutes_count_from_before_the_cameras_on(tmp_path, monkeypatch):
    clock = iter([1000.0, 1600.0])
    fake = SimpleNamespace(monotonic=lambda: next(clock))
    monkeypatch.setattr(commands, "time", fake)
    monkeypatch.setattr(time_plan, "time", fake)
    done = run_with_minutes(tmp_path, monkeypatch)
    assert done == ["cameras", "plan", "began 600 s before"]


def test_minutes_that_cannot_be_planned_are_refused_before_the_cameras(tmp_path, monkeypatch):
    with pytest.raises(UserError, match="--minutes chooses the schedules"):
        run_with_minutes(tmp_path, monkeypatch, "--schedule_scale", 0.1)


@pytest.mark.slow
def test_too_few_minutes_are_said_and_the_run_ends_with_what_is_possible(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(lengths, "LEAST", lengths.LEAST | {"coarse": 16})
    scene = make_tiny_scene(tmp_path / "scene")
    short = SHORT_PIPELINE[:2] + SHORT_PIPELINE[4:]
    checkpoint = make_tiny_checkpoint(tmp_path / "vanilla", scene)
    words = ("-s", scene.root, "-c", checkpoint, *short, "--output_dir", tmp_path / "out")
    words = (*words, "--minutes", 0.001)
    assert run_cli(train.main, *words) == 0
    said = capsys.readouterr().out
    assert "too short for this capture" in said
    assert "refine: left out" in said
    assert "the plan was 0.001" in said
    assert list((tmp_path / "out" / "refined_mesh" / "scene").glob("*.obj"))
    assert json.loads((tmp_path / "out" / "time_plan_scene.json").read_text())["chosen"]
    assert run_cli(train.main, *words) == 0
    assert "finished already" in capsys.readouterr().out
