# SPDX-License-Identifier: Apache-2.0
"""The coarse stage in multi-view mode: strips, draws, trims, masks, resuming, whole runs."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace

import pytest
import torch

import extract_mesh
import train
import train_coarse_multiview
from gaussian_splatting.components.densification import FINEST_ANGLE
from gaussian_splatting.components.exposures import NO_LATER_EXPOSURE
from gaussian_splatting.components.sky_sphere import SKY_RADIUS
from gaussian_splatting.core.cloud import CUTOFF, GaussianCloud
from gaussian_splatting.data.cameras import ViewMask
from gaussian_splatting.data.images import ImageStore
from gaussian_splatting.engine.strips import WHOLE_IMAGE, ImageSplit
from gaussian_splatting.engine.training_views import TrainingView
from gaussian_splatting.rasterization import WARP
from gaussian_splatting.rasterization.backends import GsplatRasterizer
from sugar_pipeline.quality.model_metrics import metrics_options, metrics_parser
from sugar_scene.mesh_bound import bind_to_mesh
from sugar_scene.plane_kernels import LARGE_MISMATCH, UNCOUNTED
from sugar_scene.reprojection import NeighborViews
from sugar_scene.triangle_mesh import read_mesh_ply
from sugar_trainers.multiview_stage import MultiviewStage, comparison_rule, views_that_see
from sugar_trainers.refine_stage import DEPTH, MeshView, RefineStage
from sugar_trainers.stage_config import (
    LEAST_INTERVALS,
    MultiviewConfig,
    MultiviewSchedule,
    RefineConfig,
)
from sugar_trainers.view_comparison import (
    ComparisonRule,
    ViewComparer,
    gray_of,
    spread_pixels,
)
from tests.support.command_line import as_flags
from tests.support.command_words import train_plan
from tests.support.mesh_scenes import icosahedron
from tests.support.rasterizer_doubles import FakeGsplat
from tests.support.tiny_scene import (
    assert_same_bits,
    disturbed_cloud,
    events,
    load_pt,
    make_tiny_checkpoint,
    make_tiny_scene,
    run_cli,
)
from tests.support.training import accumulate, everywhere, learn

pytestmark = pytest.mark.usefixtures("small_pictures")

EXTENT = 3.3
ITERATION = 7_001
FOLDER = "sugarcoarse_3Dgs7000_multiview"
TERMS = {"loss", "color", "plane_normal", "views", "flatten"}


@pytest.fixture(scope="module")
def scene(tmp_path_factory):
    """Forty views at twice the tiny size, so that they have neighbours and room for patches."""
    return make_tiny_scene(tmp_path_factory.mktemp("scene"), 40, zoom=2)


@pytest.fixture(scope="module")
def checkpoint(scene, tmp_path_factory):
    return make_tiny_checkpoint(tmp_path_factory.mktemp("vanilla"), scene)


def make_stage(scene, cloud=None, rasterizer=WARP, **settings) -> MultiviewStage:
    """The stage on all views, without exposures."""
    config = MultiviewConfig(**{"exposure": NO_LATER_EXPOSURE, **settings})
    cloud = disturbed_cloud(scene.cloud) if cloud is None else cloud
    neighbors = NeighborViews(scene.cameras, EXTENT)
    store = ImageStore(budget_bytes=10**8)
    comparer = ViewComparer(
        neighbors, store, EXTENT, comparison_rule(config), rasterizer, device=torch.device("cpu")
    )
    region = everywhere(EXTENT)
    return MultiviewStage(cloud, config, region, scene.cameras, comparer, lambda line: None)


def see(stage: MultiviewStage, scene, camera=None, iteration=ITERATION):
    camera = camera or scene.cameras[3]
    stage.begin(iteration)
    with ImageStore(budget_bytes=10**8) as store:
        result = learn(stage, iteration, camera, store.get(camera))
    return result, stage.model.optimizer.gradients()


@pytest.mark.parametrize(
    ("deviations", "rasterizer", "expected"),
    [
        (2.5, WARP, {CUTOFF: 2.5}),
        (1.5, WARP, {CUTOFF: 1.5}),
        (0.0, WARP, {}),
        (2.5, GsplatRasterizer(FakeGsplat()), {}),
    ],
)
def test_gaussians_end_where_the_setting_says_if_the_rasterizer_can_end_them(
    scene, deviations, rasterizer, expected
):
    stage = make_stage(scene, rasterizer=rasterizer, cutoff_deviations=deviations)
    assert stage.model.activate().rendering() == expected
    assert stage.model.state().get(CUTOFF) == expected.get(CUTOFF)


def test_all_terms_act_and_pull_at_the_geometry(scene):
    result, gradients = see(make_stage(scene), scene)
    assert set(result.terms) == TERMS
    assert all(float(value) > 0 for value in result.terms.values()), result.terms
    weights = MultiviewConfig()
    expected = (
        result.terms["color"]
        + weights.plane_normal_factor * result.terms["plane_normal"]
        + result.terms["views"]
        + weights.flatten_factor * result.terms["flatten"]
    )
    assert float(result.terms["loss"]) == pytest.approx(float(expected), rel=1e-5)
    for name in ("means", "quats", "log_scales"):
        assert gradients[name].any()


@pytest.mark.parametrize("strips", [2, 7, 96])
def test_gradients_of_strips_are_those_of_the_whole_image(scene, strips):
    whole, expected = see(make_stage(scene, split=WHOLE_IMAGE), scene)
    parts, found = see(make_stage(scene, split=ImageSplit(strips)), scene)
    for name, value in whole.terms.items():
        assert float(parts.terms[name]) == pytest.approx(float(value), rel=1e-4), name
    for name, gradient in expected.items():
        assert float((found[name] - gradient).norm()) <= 2e-4 * float(gradient.norm()), name


def test_a_step_has_the_same_bits_every_time(scene):
    first, second = (see(make_stage(scene), scene)[1] for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize(
    ("names", "term"),
    [
        (["plane_normal_factor"], "plane_normal"),
        (["photometric_factor", "geometric_factor"], "views"),
        (["flatten_factor"], "flatten"),
    ],
)
def test_a_term_without_weight_is_left_out(scene, names, term):
    result, _ = see(make_stage(scene, **dict.fromkeys(names, 0.0)), scene)
    assert set(result.terms) == TERMS - {term}


def test_errors_of_views_are_the_sum_of_both_kinds(scene):
    both, gradients = see(make_stage(scene), scene)
    photometric, by_patches = see(make_stage(scene, geometric_factor=0.0), scene)
    geometric, by_places = see(make_stage(scene, photometric_factor=0.0), scene)
    parts = [float(result.terms["views"]) for result in (photometric, geometric)]
    assert min(parts) > 0
    assert float(both.terms["views"]) == pytest.approx(sum(parts), rel=1e-5)
    neither, rest = see(make_stage(scene, geometric_factor=0.0, photometric_factor=0.0), scene)
    assert "views" not in neither.terms
    expected = by_patches["means"] + by_places["means"] - rest["means"]
    torch.testing.assert_close(gradients["means"], expected, rtol=1e-3, atol=1e-7)


def test_a_view_without_neighbours_trains_without_their_terms(scene):
    stage = make_stage(scene)
    stranger = replace(scene.cameras[3], name="alone.png")
    result, gradients = see(stage, scene, stranger)
    assert float(result.terms["views"]) == 0
    assert float(result.terms["plane_normal"]) > 0
    assert gradients["means"].any()


def test_large_mismatches_fade_little_by_little(scene):
    """At first patches differ because planes are off."""
    with ImageStore() as store:
        neighbors = NeighborViews(scene.cameras, EXTENT)
        comparer = ViewComparer(
            neighbors, store, EXTENT, ComparisonRule(100, 0, 700), device=torch.device("cpu")
        )
        camera = scene.cameras[0]
        photograph, depth = store.get(camera), torch.ones(camera.height, camera.width)
        found = [
            comparer.comparison(TrainingView(camera, photograph, iteration), lambda other: depth)
            for iteration in (700, 950, 1_200, 9_000)
        ]
    # The last of a pair's numbers is the reciprocal of the mismatch at which gradients fade.
    tolerances = [float(1 / (LARGE_MISMATCH * comparison.numbers[-1])) for comparison in found]
    assert tolerances == pytest.approx([500, 2, 1, 1])


def test_short_schedules_measure_the_views_seldom():
    def tests_of(*words: str) -> tuple[int, ...]:
        plan = train_plan("-s", "scene", "-c", "checkpoint", *words)
        return plan.coarse.loop.test_iterations

    assert tests_of("-r", "sdf") == (7_000, 8_000, 9_000, 10_000, 12_000, 15_000)
    assert tests_of("-r", "sdf", "--schedule_scale", "0.1") == (1_000, 1_500)
    given = ("--test_iterations", "7000", "8000")
    assert tests_of("-r", "sdf", "--schedule_scale", "0.1", *given) == (700, 800)


@pytest.mark.slow
def test_training_brings_planes_together(scene):
    """The term of views itself may rise: pixels that did not meet the neighbour come to count."""
    stage = make_stage(scene)

    def agreement() -> dict[str, float]:
        found = dict.fromkeys(("plane_normal", "correlation", "cycle"), 0.0)
        for camera in scene.cameras[::5]:
            found["plane_normal"] += float(see(stage, scene, camera)[0].terms["plane_normal"])
            for name, picture in stage.view_maps(camera).items():
                found[name] += float(picture.float().mean())
        stage.model.optimizer.zero_grad()
        return found

    first = agreement()
    for step in range(90):
        see(stage, scene, scene.cameras[(7 * step) % 40], ITERATION + step)
        stage.apply(ITERATION + step)
    last = agreement()
    changes = {name: last[name] / first[name] for name in first}
    assert changes["plane_normal"] < 0.9
    assert changes["correlation"] > 1.01
    assert changes["cycle"] > 1.1


def test_pixels_are_drawn_apart_and_evenly():
    candidates = torch.zeros(20, 30, dtype=torch.bool)
    candidates[5:15] = True

    def spread(among, n):
        rng = torch.Generator().manual_seed(0)
        return spread_pixels(among, torch.zeros(20, 30), n, rng)

    pixels = spread(candidates, 100)
    assert pixels.shape == (100, 2)
    assert len({tuple(pixel) for pixel in pixels.tolist()}) == 100
    assert candidates[pixels[:, 1].long(), pixels[:, 0].long()].all()
    assert torch.bincount(pixels[:, 1].long(), minlength=20)[5:15].tolist() == [10] * 10
    rows = pixels[:, 1]
    assert (rows[1:] >= rows[:-1]).all()
    everything = spread(candidates, 10_000)
    assert len(everything) == 300
    nothing = spread(candidates & False, 10)
    assert nothing.shape == (0, 2)
    assert torch.equal(spread(None, 50), spread(candidates | True, 50))


def test_what_a_mask_leaves_out_has_no_grey_value():
    photograph = torch.full((4, 5, 4), 200, dtype=torch.uint8)
    photograph[:, :2, 3] = 0
    gray = gray_of(photograph)
    assert (gray[:, :2] == UNCOUNTED).all()
    assert (gray[:, 2:] > 0.7).all()


@pytest.mark.parametrize("mode", ["object", "ignore"])
def test_terms_look_only_where_the_mask_counts(scene, tmp_path, mode):
    from PIL import Image

    camera = scene.cameras[3]
    path = tmp_path / "mask.png"
    Image.new("L", (camera.width, camera.height), 0).save(path)
    stage = make_stage(scene)
    masked = replace(camera, mask=ViewMask(path, mode))
    result, _ = see(stage, scene, masked)
    for name in ("plane_normal", "views"):
        assert float(result.terms[name]) == 0, name


def with_hidden(cloud: GaussianCloud) -> GaussianCloud:
    """One more Gaussian in the middle of the ball, which no view sees."""
    rows = {name: torch.cat([t, t[:1]]) for name, t in cloud.tensors().items()}
    rows["means"][-1] = 0.0
    rows["log_scales"][-1] = -4.0
    return GaussianCloud(**rows)


def test_what_no_view_sees_is_dropped(scene):
    big = scene.cloud
    big = GaussianCloud(**{**big.tensors(), "log_scales": big.log_scales + 1.0})
    cloud = with_hidden(big)
    seen = views_that_see(cloud.activate(), scene.cameras)
    assert int(seen[-1]) == 0
    assert float((seen[:-1] >= 2).float().mean()) > 0.95
    schedule = MultiviewSchedule(trim_interval=10)
    stage = make_stage(scene, cloud, schedule=schedule)
    stage.begin(7_009)
    assert len(stage.model) == len(cloud)
    stage.begin(7_010)
    assert len(stage.model) == int((seen >= 2).sum())
    assert float(stage.model.cloud.means.detach().norm(dim=1).min()) > 0.5


def test_densification_ends_and_short_schedules_leave_time():
    schedule = MultiviewSchedule()
    assert schedule.densification_due(7_100)
    assert not schedule.densification_due(7_000)
    assert not schedule.densification_due(7_150)
    assert not schedule.densification_due(15_000)
    assert schedule.trim_due(19_000)
    short = schedule.scaled(0.01)
    assert (short.first, short.last) == (70, 200)
    assert short.densification_interval == LEAST_INTERVALS["densification_interval"]
    assert short.trim_interval == LEAST_INTERVALS["trim_interval"]


def test_a_short_stage_takes_half_the_iterations_and_larger_steps(scene):
    whole, short = (MultiviewSchedule.from_flags(0.1, short) for short in (False, True))
    assert (whole.first, whole.densify_until, whole.last) == (700, 1_500, 2_000)
    assert (short.first, short.densify_until, short.last) == (700, 1_100, 1_350)
    assert (short.trim_interval, short.schedule_scale) == (LEAST_INTERVALS["trim_interval"], 0.1)
    # The rate of positions goes the same way in half the time, and a whole schedule as it did.
    for schedule in (whole, short):
        ends = [schedule.paper_iteration(i) for i in (schedule.first, schedule.last)]
        assert ends == pytest.approx([7_000, 20_000])
    assert whole.paper_iteration(1_203) == 1_203 / 0.1
    assert (whole.rate_factor, short.rate_factor) == (1, 3)
    assert MultiviewSchedule.from_flags(1.0, True).rate_factor == pytest.approx(2**0.5)
    usual, hasty = (make_stage(scene, schedule=s) for s in (whole, short))
    for stage in (usual, hasty):
        stage.begin(700)
    for name, rate in usual.model.optimizer.learning_rates().items():
        assert hasty.model.optimizer.learning_rates()[name] == pytest.approx(3 * rate), name


def test_gaussians_grow_while_the_schedule_says_so(scene):
    schedule = MultiviewSchedule(densification_interval=2, densify_until=7_004)
    config = MultiviewConfig()
    rules = replace(config.densification, densify_grad_threshold=1e-9, max_gaussians=230)
    stage = make_stage(scene, schedule=schedule, densification=rules)
    numbers = []
    for iteration in range(7_001, 7_009):
        see(stage, scene, scene.cameras[iteration % 40], iteration)
        stage.apply(iteration)
        # A round changes the model after it was measured and saved: before the next iteration.
        stage.begin(iteration + 1)
        numbers.append(len(stage.model))
    assert numbers[0] == 200
    assert numbers[1] > 200
    assert max(numbers) <= 230
    assert len(set(numbers[3:])) == 1


def test_what_is_infinitely_far_grows_by_its_angle_only(scene):
    """Beside a sky, which the threshold would have cloned again and again."""
    rows = {name: torch.cat([t, t[:20]]) for name, t in scene.cloud.tensors().items()}
    away = rows["means"][-20:]
    rows["means"][-20:] = away / away.norm(dim=1, keepdim=True) * SKY_RADIUS * EXTENT
    rows["log_scales"][-20:] = math.log(0.5 * FINEST_ANGLE * SKY_RADIUS * EXTENT)
    rules = replace(MultiviewConfig().densification, densify_grad_threshold=1e-12)
    schedule = MultiviewSchedule(densification_interval=1)
    stage = make_stage(scene, GaussianCloud(**rows), schedule=schedule, densification=rules)
    see(stage, scene, iteration=7_001)
    stage.apply(7_001)
    stage.begin(7_002)
    far = stage.model.cloud.means.detach().norm(dim=1) > 0.5 * SKY_RADIUS * EXTENT
    assert len(stage.model) > 220
    assert int(far.sum()) == 20


# Refinement


def bound_stage(scene, **settings) -> RefineStage:
    """A ball of twenty triangles, refined with the terms of the mode."""
    ball = icosahedron()
    cloud = bind_to_mesh(
        torch.tensor(ball.vertices, dtype=torch.float32),
        torch.tensor(ball.faces),
        torch.full((len(ball.vertices), 3), 0.5),
        6,
        EXTENT,
    )
    store = ImageStore(budget_bytes=10**8)
    comparer = ViewComparer(
        NeighborViews(scene.cameras, EXTENT),
        store,
        EXTENT,
        ComparisonRule(2_000, 0),
        device=torch.device("cpu"),
    )
    return RefineStage(cloud, RefineConfig(**settings), EXTENT, comparer=comparer)


def test_the_refinement_compares_views_too(scene):
    result, gradients = see(bound_stage(scene, refine_surface_terms=True), scene, iteration=1)
    assert float(result.terms["views"]) > 0
    assert gradients["vertices"].any()


def test_comparing_views_moves_the_mesh_and_nothing_else(scene):
    """Opacity must not be a way to make views agree: a transparent mesh would."""
    with_terms = see(bound_stage(scene, refine_surface_terms=True), scene, iteration=1)[1]
    stage = bound_stage(scene, refine_surface_terms=True)
    stage.terms = tuple(t for t in stage.terms if t.name != "views")
    without = see(stage, scene, iteration=1)[1]
    assert not torch.equal(with_terms.pop("vertices"), without.pop("vertices"))
    for name, gradient in without.items():
        assert torch.equal(with_terms[name], gradient), name


def test_gaussians_are_drawn_to_cover_the_mesh(scene):
    """What is seen through it is at another depth."""
    with_term = see(bound_stage(scene, refine_surface_terms=True), scene, iteration=1)[1]
    stage = bound_stage(scene, refine_surface_terms=True)
    stage.terms = tuple(term for term in stage.terms if term.name != DEPTH)
    without = see(stage, scene, iteration=1)[1]
    for name in ("opacity_logits", "log_scales"):
        assert float((with_term[name] - without[name]).sum()) < 0, name


def test_pixels_that_the_mesh_does_not_cover_pull_at_nothing(scene):
    """The same photograph with another background."""
    gradients = []
    for shade in (0, 200):
        stage = bound_stage(scene, refine_surface_terms=True)
        camera = scene.cameras[3]
        covered = MeshView(stage.model.cloud, camera).hits(camera).covered
        assert 0.1 < float(covered.float().mean()) < 0.6
        with ImageStore(budget_bytes=10**8) as store:
            photograph = store.get(camera).clone()
        photograph[~covered] = shade
        stage.begin(1)
        accumulate(stage, 1, camera, photograph)
        gradients.append(stage.model.optimizer.gradients())
    for name, first in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], first, rtol=0, atol=1e-7)


# Whole runs


def flags(scene, checkpoint, output, *more):
    return (
        *as_flags(
            s=scene.root,
            c=checkpoint,
            schedule_scale=0.003,
            o=output,
            multiview_pixels=2_000,
            max_gaussians=260,
            checkpoint_interval=3_000,
        ),
        *more,
    )


@pytest.fixture(scope="module")
def run(scene, checkpoint, tmp_path_factory):
    output = tmp_path_factory.mktemp("run")
    assert run_cli(train_coarse_multiview.main, *flags(scene, checkpoint, output)) == 0
    return output / FOLDER


@pytest.mark.slow
def test_a_run_writes_model_pictures_and_report(run):
    payload = load_pt(run / "60.pt")
    assert payload["iteration"] == 60
    assert payload[CUTOFF] == 2.5
    record = json.loads((run / "run.json").read_text(encoding="utf-8"))
    assert record["settings"]["regularization_type"] == "multiview"
    assert record["settings"]["exposure"]["exposure_compensation"] is True
    assert (run / "report.html").is_file()
    found = events(run)
    assert {f"Loss/{name}" for name in TERMS} <= set(found.Tags()["scalars"])
    pictures = {tag.rpartition("/")[2] for tag in found.Tags()["images"]}
    assert {"correlation", "cycle", "render"} <= pictures


@pytest.mark.parametrize("iteration", [pytest.param(27, marks=pytest.mark.slow), 45])
def test_a_killed_run_goes_on_with_the_same_bits(run, scene, checkpoint, tmp_path, iteration):
    (tmp_path / FOLDER).mkdir(parents=True)
    shutil.copy(run / f"{iteration}.pt", tmp_path / FOLDER)
    record = json.loads((run / "run.json").read_text(encoding="utf-8"))
    (tmp_path / FOLDER / "run.json").write_text(json.dumps({**record, "status": "running"}))
    assert run_cli(train_coarse_multiview.main, *flags(scene, checkpoint, tmp_path)) == 0
    assert_same_bits(run / "60.pt", tmp_path / FOLDER / "60.pt")


@pytest.mark.slow
def test_a_short_run_goes_on_with_the_same_bits(scene, checkpoint, tmp_path):
    short = "--preset", "fast", "--schedule_scale", 0.002
    folders = [tmp_path / name / FOLDER for name in ("whole", "killed")]
    assert (
        run_cli(train_coarse_multiview.main, *flags(scene, checkpoint, folders[0].parent, *short))
        == 0
    )
    folders[1].mkdir(parents=True)
    record = json.loads((folders[0] / "run.json").read_text(encoding="utf-8"))
    assert record["settings"]["schedule"]["short_multiview"] is True
    shutil.copy(folders[0] / "24.pt", folders[1])
    (folders[1] / "run.json").write_text(json.dumps({**record, "status": "running"}))
    assert (
        run_cli(train_coarse_multiview.main, *flags(scene, checkpoint, folders[1].parent, *short))
        == 0
    )
    assert_same_bits(*(folder / "27.pt" for folder in folders))


@pytest.mark.slow
def test_a_mesh_of_the_model_is_fused_of_its_planes_by_default(
    run, scene, checkpoint, tmp_path, capsys
):
    code = run_cli(
        extract_mesh.main,
        s=scene.root,
        c=checkpoint,
        m=run,
        d=2_000,
        o=tmp_path,
        background_mesh=False,
    )
    assert code == 0
    (path,) = tmp_path.glob("*.ply")
    assert path.name == "sugarmesh_3Dgs7000_multiview_tsdf_decim2000.ply"
    note = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
    assert note["settings"]["tsdf"]["tsdf_depth"] == "plane"
    assert read_mesh_ply(path).n_faces > 500


@pytest.mark.slow
def test_the_pipeline_takes_the_mode(scene, checkpoint, tmp_path):
    code = run_cli(
        train.main,
        s=scene.root,
        c=checkpoint,
        r="multiview",
        schedule_scale=0.001,
        stop_after="mesh",
        max_gaussians=250,
        v=2_000,
        background_mesh=False,
        output_dir=tmp_path,
    )
    assert code == 0
    assert (tmp_path / "coarse" / scene.root.name / FOLDER / "13.pt").is_file()
    assert list((tmp_path / "coarse_mesh" / scene.root.name).glob("*multiview_tsdf*.ply"))


def test_the_multi_view_mode_has_names_of_its_own(tmp_path):
    words = ["--scene_config", '{"a/scene": "vanilla"}', "-r", "multiview"]
    options = metrics_options(metrics_parser(None).parse_flags(words))
    assert options.variant == "tsdf"
    assert options.result_path.name == "results_multiview_tsdf.json"
    name = options.refined_name
    assert name.startswith("sugarfine_3Dgs7000_multiview_tsdf_decim1000000")
    poisson = metrics_options(
        metrics_parser(None).parse_flags([*words, "--mesh_extractor", "poisson"])
    )
    assert poisson.variant == ""


def test_flags_of_other_modes_are_named(scene, checkpoint, tmp_path):
    words = ["-s", str(scene.root), "-c", str(checkpoint), "-r", "multiview"]
    plan = train_plan(*words, "--sdf_samples", 5)
    assert "--sdf_samples: no effect with multiview" in plan.messages
    plain = train_plan(*words)
    assert not any("no effect" in line for line in (*plain.messages, *plain.coarse.messages))
