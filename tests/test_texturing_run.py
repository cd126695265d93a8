# SPDX-License-Identifier: Apache-2.0
"""Whole texture runs on a tiny scene: what they write, that they skip, and what they refuse."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

import extract_refined_mesh_with_texture as script
from gaussian_splatting.core.cloud import Gaussians
from gaussian_splatting.core.spherical_harmonics import SH_C0
from gaussian_splatting.data.cameras import Camera
from gaussian_splatting.engine.checkpoint import save_payload
from gaussian_splatting.losses.exposure import exposed, mean_exposure
from gaussian_splatting.rasterization import render_view
from gaussian_splatting.scenes.reference_layout import point_cloud_path, write_exposures
from sugar_extractors.export.reading import read_bound_gaussians
from sugar_extractors.texture.texturing import TextureOptions, texture_parser
from sugar_scene.bound_model import FACES, STATE_NAMES
from sugar_scene.mesh_files import textured_mesh_io
from sugar_scene.mesh_files.textured_mesh_io import read_textured_mesh, render_textured
from sugar_utils.flags import Parser
from sugar_utils.settings import add_flags, from_args
from tests.support.refined_models import NAME, refined_state, save_model
from tests.support.tiny_scene import (
    load_pt,
    make_tiny_checkpoint,
    make_tiny_scene,
    refusal,
    run_cli,
    tiny_cloud,
)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    root = tmp_path_factory.mktemp("texture")
    scene = make_tiny_scene(root / "scene")
    checkpoint = make_tiny_checkpoint(root / "vanilla", scene)
    model = save_model(root, refined_state())
    return scene, ["-s", scene.root, "-c", checkpoint], model


def texture(inputs, output, *flags, model=None) -> int:
    _, shared, own = inputs
    return run_cli(script.main, *shared, "-m", model or own, "-o", output, *flags)


def test_a_run_writes_all_files_under_the_name_of_the_model(inputs, tmp_path):
    assert texture(inputs, tmp_path, "-n", 3, "--square_size", 24) == 0
    names = sorted(path.name for path in tmp_path.iterdir())
    files = [f"{NAME}{suffix}" for suffix in (".glb", ".json", ".mtl", ".obj", ".png")]
    assert names == files
    mesh = read_textured_mesh(tmp_path / f"{NAME}.obj")
    assert mesh.n_faces == 20
    assert mesh.texture.shape == (24 * 4, 24 * 4, 3)
    for camera in inputs[0].cameras[1:4]:
        image = render_textured(mesh, camera, supersampling=2).numpy()
        middle = image[22:28, 30:36].mean(axis=(0, 1))
        # The ball shows the camera its near side, whose colour is its position.
        expected = 0.5 + 0.4 * camera.center / np.linalg.norm(camera.center)
        np.testing.assert_allclose(middle, expected, atol=0.12)
    note = json.loads((tmp_path / f"{NAME}.json").read_text())
    assert note["settings"]["square_size"] == 24
    assert note["result"]["faces"] == 20
    assert note["result"]["views"] == 8
    assert note["result"]["seen_face_share"] > 0.8
    assert note["result"]["peak_bytes"] > 0


def test_renders_show_what_hangs_in_front_of_the_mesh(inputs, tmp_path):
    """Colours of the mesh were learned behind it, so that without it they are wrong."""
    shell = tiny_cloud()
    haze = replace(
        shell,
        means=1.2 * shell.means,
        sh_dc=torch.full_like(shell.sh_dc, 0.5 / SH_C0),
        opacity_logits=torch.full_like(shell.opacity_logits, -1.5),
    )
    colors = {}
    for name, background in (("plain", None), ("hazy", haze)):
        model = save_model(tmp_path / name, refined_state(), background=background)
        assert texture(inputs, tmp_path / name, "--export_glb", "False", model=model) == 0
        mesh = read_textured_mesh(tmp_path / name / f"{NAME}.obj")
        gaussians = read_bound_gaussians(model).activate_all()
        camera = inputs[0].cameras[1]
        pictures = render_textured(mesh, camera, supersampling=2), render_image(gaussians, camera)
        colors[name], expected = (picture[16:32, 24:40].mean(dim=(0, 1)) for picture in pictures)
        torch.testing.assert_close(colors[name], expected, rtol=0, atol=0.04)
    assert bool((colors["hazy"] > colors["plain"] + 0.05).all())


def render_image(gaussians: Gaussians, camera: Camera) -> torch.Tensor:
    """Render view-independent colours of Gaussians on black. (H, W, 3)"""
    output = render_view(gaussians, camera, white=False, geometry=False, sh_degree=0)
    assert output.image is not None
    return output.image


@pytest.mark.parametrize(
    "flags",
    [("--texture_source", "photos"), ("--texture_atlas", "xatlas"), ("--square_size", "auto")],
)
def test_other_sources_and_atlases(inputs, tmp_path, flags):
    if "xatlas" in flags:
        pytest.importorskip("xatlas")
    assert texture(inputs, tmp_path, *flags, "--export_glb", "False") == 0
    mesh = read_textured_mesh(tmp_path / f"{NAME}.obj")
    assert mesh.texture.float().std() > 10
    assert not (tmp_path / f"{NAME}.glb").exists()


@pytest.mark.slow
@pytest.mark.parametrize("learned_by", ["refinement", "checkpoint"])
def test_photographs_of_changing_exposure_give_the_colours_of_the_mean_one(
    inputs, tmp_path, learned_by
):
    """Learned exposures are taken out: the texture is that of photographs of one exposure."""
    scene, shared, model = inputs
    root = tmp_path / "scene"
    shutil.copytree(scene.root, root)
    exposures = {}
    for number, camera in enumerate(scene.cameras):
        gain, offset = (0.55, 0.75, 0.9)[number % 3], (0.1, 0.0, 0.05)[number % 3]
        path = root / "images" / camera.name
        pixels = np.asarray(Image.open(path), dtype=np.float64) * gain + 255 * offset
        Image.fromarray(pixels.round().astype(np.uint8)).save(path)
        exposures[camera.name] = torch.tensor([[math.log(gain)] * 3, [offset] * 3])
    checkpoint = make_tiny_checkpoint(tmp_path / "vanilla", scene)
    changed = save_model(tmp_path, refined_state())
    if learned_by == "refinement":
        payload = load_pt(changed)
        kept = {f"exposure of {n}": torch.stack([e, e * 0, e * 0]) for n, e in exposures.items()}
        save_payload(changed, {**payload, "resume": {"stage": kept}})
    else:
        write_exposures(point_cloud_path(checkpoint, 7000).with_name("exposure.json"), exposures)
    words = ("--texture_source", "photos", "--export_glb", "False")
    assert texture(inputs, tmp_path / "even", *words) == 0
    taken = ["-s", root, "-c", checkpoint]
    assert texture((scene, taken, changed), tmp_path / "changing", *words) == 0
    even, changing = (
        read_textured_mesh(tmp_path / name / f"{NAME}.obj").texture.float()
        for name in ("even", "changing")
    )
    mean = mean_exposure(torch.stack(list(exposures.values())))
    expected = 255 * exposed(even / 255, mean)
    differences = (expected - changing).abs().flatten()
    assert float(differences.mean()) < 1.5
    assert float(differences.quantile(0.99)) < 8
    note = json.loads((tmp_path / "changing" / f"{NAME}.json").read_text())
    assert "exposures" in note["inputs"]


def test_what_a_killed_process_left_of_its_lock_goes_with_the_next_run(inputs, tmp_path):
    assert texture(inputs, tmp_path) == 0
    for name in (f".{NAME}.lock", f".{NAME}.lock.json"):
        (tmp_path / name).touch()
    assert texture(inputs, tmp_path) == 0
    assert not list(tmp_path.glob(".*"))


@pytest.mark.slow
def test_a_finished_run_is_not_repeated_and_another_is_refused(inputs, tmp_path, capsys):
    assert texture(inputs, tmp_path) == 0
    stamps = {path: path.stat().st_mtime_ns for path in tmp_path.glob(f"{NAME}.*")}
    assert texture(inputs, tmp_path) == 0
    assert "exists already" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in tmp_path.glob(f"{NAME}.*")} == stamps
    assert texture(inputs, tmp_path, "--square_size", 12) == 2
    error = capsys.readouterr().err
    assert "was made with other settings" in error
    assert "square_size: 10 → 12" in error
    assert "pass --overwrite True" in error
    assert texture(inputs, tmp_path, "--square_size", 12, "--overwrite", "True") == 0
    assert read_textured_mesh(tmp_path / f"{NAME}.obj").texture.shape[0] == 12 * 4
    (tmp_path / f"{NAME}.png").unlink()
    assert texture(inputs, tmp_path, "--square_size", 12) == 0
    assert (tmp_path / f"{NAME}.png").is_file()


def test_a_copy_in_metres_is_made_of_the_finished_mesh(inputs, tmp_path, capsys):
    assert texture(inputs, tmp_path) == 0
    before = {path: path.read_bytes() for path in tmp_path.glob(f"{NAME}.*")}
    first, second = inputs[0].cameras[1], inputs[0].cameras[2]
    words = ("--orient", "up", "--known_distance", first.name, second.name, 3)
    assert texture(inputs, tmp_path, *words) == 0
    assert "exists already" in capsys.readouterr().out
    assert {path: path.read_bytes() for path in tmp_path.glob(f"{NAME}.*")} == before
    assert (tmp_path / f"{NAME}_placed.glb").is_file()
    matrix = np.array(json.loads((tmp_path / f"{NAME}_placed.json").read_text())["matrix"])
    apart = matrix[:3, :3] @ (first.center - second.center)
    assert np.linalg.norm(apart) == pytest.approx(3)
    assert texture(inputs, tmp_path, "--known_distance", first.name, "missing.png", 3) == 2
    assert "missing.png: neither a registered photograph" in capsys.readouterr().err


def test_a_stranger_is_not_replaced(inputs, tmp_path, capsys):
    (tmp_path / f"{NAME}.obj").write_text("mine")
    assert texture(inputs, tmp_path) == 2
    assert "has no settings beside it" in capsys.readouterr().err
    assert (tmp_path / f"{NAME}.obj").read_text() == "mine"


def test_photographs_are_needed_for_photos_only(tmp_path, capsys):
    scene = make_tiny_scene(tmp_path / "scene")
    shared = ["-s", scene.root, "-c", make_tiny_checkpoint(tmp_path / "vanilla", scene)]
    for path in (scene.root / "images").iterdir():
        path.unlink()
    inputs = (scene, shared, save_model(tmp_path, refined_state()))
    assert texture(inputs, tmp_path / "out", "--texture_source", "photos") == 2
    assert capsys.readouterr().err.startswith("error:")
    assert texture(inputs, tmp_path / "out") == 0


def test_photographs_that_go_missing_are_one_line_and_leave_the_earlier_mesh(tmp_path, capsys):
    scene = make_tiny_scene(tmp_path / "scene")
    shared = ["-s", scene.root, "-c", make_tiny_checkpoint(tmp_path / "vanilla", scene)]
    inputs = (scene, shared, save_model(tmp_path, refined_state()))
    assert texture(inputs, tmp_path / "out") == 0
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    lost = scene.root / "images" / scene.cameras[3].name
    lost.unlink()
    capsys.readouterr()
    words = ("--texture_source", "photos", "--overwrite", "True")
    assert texture(inputs, tmp_path / "out", *words) == 2
    error = capsys.readouterr().err
    assert lost.name in error
    assert error.count("\n") == 1
    assert {p.name: p.read_bytes() for p in (tmp_path / "out").iterdir()} == before


def test_a_damaged_photograph_is_left_out_of_a_texture(tmp_path, capsys):
    scene = make_tiny_scene(tmp_path / "scene")
    shared = ["-s", scene.root, "-c", make_tiny_checkpoint(tmp_path / "vanilla", scene)]
    inputs = (scene, shared, save_model(tmp_path, refined_state()))
    damaged = scene.root / "images" / scene.cameras[3].name
    damaged.write_bytes(damaged.read_bytes()[:200])
    assert texture(inputs, tmp_path / "out", "--texture_source", "photos") == 0
    told = capsys.readouterr().out
    assert f"photographs that cannot be read: {damaged.name}" in told


@pytest.mark.slow
def test_the_size_follows_from_the_photographs_up_to_a_limit(inputs, tmp_path):
    sides = []
    for name, words in (("free", ()), ("limited", ("--texture_size", 40))):
        words = ("--texture_source", "photos", "--square_size", "auto", *words)
        assert texture(inputs, tmp_path / name, *words) == 0
        sides.append(read_textured_mesh(tmp_path / name / f"{NAME}.obj").texture.shape[0])
    # Triangles of the ball have sides of some 15 pixels, four squares lie side by side.
    assert 4 * 12 <= sides[0] <= 4 * 30
    assert sides[1] == 40


def test_peeling_makes_a_file_of_its_own(inputs, tmp_path, capsys):
    state = refined_state()
    # Open the ball, and make the triangles at the hole transparent.
    state[FACES] = state[FACES][:15]
    for file in STATE_NAMES.values():
        if file != "_points":
            state[file] = state[file][:45]
    state["all_densities"][:] = -8.0
    state["all_densities"][:15] = 6.0
    model = save_model(tmp_path / "models", state)
    flags = ("--postprocess_mesh", "True", "--postprocess_iterations", 1)
    assert texture(inputs, tmp_path / "out", *flags, model=model) == 0
    mesh = read_textured_mesh(tmp_path / "out" / f"{NAME}_postprocessed.obj")
    assert 5 <= mesh.n_faces < 15
    state["all_densities"][:] = -8.0
    faint = save_model(tmp_path / "faint", state)
    assert texture(inputs, tmp_path / "none", *flags[:2], model=faint) == 2
    assert "no triangle is left after peeling" in capsys.readouterr().err


def test_a_full_disk_is_one_line_and_leaves_the_earlier_mesh(inputs, tmp_path, monkeypatch, capsys):
    assert texture(inputs, tmp_path) == 0
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def full(*_):
        yield b"v 1 2"
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(textured_mesh_io, "obj_chunks", full)
    assert texture(inputs, tmp_path, "--square_size", 14, "--overwrite", "True") == 2
    error = capsys.readouterr().err
    assert "cannot write" in error
    assert "No space left on device" in error
    assert error.count("\n") == 1
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def without_faces(state):
    state[FACES] = state[FACES][:0]
    for file in STATE_NAMES.values():
        if file != "_points":
            state[file] = state[file][:0]


def with_nan(state):
    state["_points"][3, 1] = torch.nan


def with_wrong_faces(state):
    state[FACES][0, 0] = 99


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (without_faces, "there are no Gaussians"),
        (with_nan, "_points has values of NaN"),
        (with_wrong_faces, "vertices that are not there"),
        (lambda state: state.pop("_scales"), "lacks _scales: not a refined SuGaR model"),
        (lambda state: state.update(all_densities=state["all_densities"][:-1]), "expected (59, 2)"),
    ],
)
def test_wrong_models_are_one_line(inputs, tmp_path, capsys, damage, message):
    state = refined_state()
    damage(state)
    model = save_model(tmp_path / "models", state)
    assert texture(inputs, tmp_path / "out", model=model) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "15000.pt" in error
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such names")
def test_a_name_that_an_obj_cannot_refer_to_is_refused(inputs, tmp_path, capsys):
    model = save_model(tmp_path, refined_state(), name="two\nlines")
    assert texture(inputs, tmp_path / "out", model=model) == 2
    error = capsys.readouterr().err
    assert "two\\nlines.obj: control characters" in error
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_wrong_flags_are_one_line(inputs, tmp_path, capsys):
    for flags, message in (
        (("-n", 6), "has 3 Gaussians per triangle, not the 6"),
        (("--square_size", 4), "use 5 or more"),
        (("-n", 5), "invalid choice"),
        (("--texture_source", "dreams"), "invalid choice"),
        (("--img_resolution", 3), "invalid choice"),
    ):
        assert texture(inputs, tmp_path / "out", *flags) == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1
    assert texture(inputs, tmp_path / "out", model=tmp_path / "none.pt") == 2
    assert "no such file; check --refined_model_path" in capsys.readouterr().err
    assert "-m/--refined_model_path is missing" in refusal(capsys, script.main, *inputs[1])


def test_flags_have_the_defaults_of_the_original(inputs):
    _, shared, model = inputs
    args = texture_parser(None).parse_flags([str(w) for w in (*shared, "-m", model, "-g", 1)])
    options = from_args(TextureOptions, args)
    assert options.square_size == 10
    assert options.n_gaussians_per_surface_triangle is None
    assert not options.postprocess_mesh
    assert (options.postprocess_density_threshold, options.postprocess_iterations) == (0.1, 5)
    assert options.iteration_to_load == 7_000
    assert options.eval
    assert options.obj_path.parts[:3] == ("output", "refined_mesh", "scene")
    assert options.compute.device_reason.startswith("computing on ")
    parser = Parser()
    add_flags(parser, TextureOptions, "texture")
    assert parser.parse_args([]).square_size is None
    assert (TextureOptions.square_size, TextureOptions.texture_source) == (8, "renders")
