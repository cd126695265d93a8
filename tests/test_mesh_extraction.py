# SPDX-License-Identifier: Apache-2.0
"""Mesh extraction from end to end on surfaces of known shape, and how it fails."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import extract_mesh
from sugar_extractors.mesh import loading, surfaces
from sugar_extractors.mesh.extraction import extract_coarse_mesh
from sugar_extractors.mesh.fusion.marching_cubes import SparseField, extract_surface
from sugar_extractors.mesh.fusion.tsdf import TsdfConfig
from sugar_extractors.mesh.level_sets import SurfaceSamples
from sugar_extractors.mesh.mesh_config import MeshOptions, mesh_options
from sugar_extractors.mesh.meshing_backends import (
    PoissonConfig,
    PycolmapBackend,
    choose_backend,
)
from sugar_extractors.mesh.poisson_regions import outlier_mask, reconstruct_region
from sugar_extractors.mesh.surface_sizes import cell_size, gaps
from sugar_scene.regions import Box
from sugar_scene.triangle_mesh import (
    TriangleMesh,
    doubled_area_normals,
    merge_meshes,
    open_edge_share,
    read_mesh_ply,
    without_small_components,
)
from sugar_utils.errors import UserError
from sugar_utils.settings import parser_of
from tests.support.extractions import brief_extraction
from tests.support.mesh_scenes import (
    MeshScene,
    cameras_around,
    far_wall,
    joined,
    sphere_cloud,
    sphere_points,
    write_mesh_scene,
)
from tests.support.tiny_scene import refusal

ROOT = Path(__file__).resolve().parent.parent


def backends() -> list:
    try:
        choose_backend("open3d")
        skip = False
    except UserError:
        skip = True
    mark = pytest.mark.skipif(skip, reason="Open3D cannot be imported here")
    return [pytest.param("pycolmap"), pytest.param("open3d", marks=mark)]


@pytest.fixture(scope="module")
def scene(tmp_path_factory) -> MeshScene:
    return write_mesh_scene(tmp_path_factory.mktemp("mesh"), sphere_cloud(), cameras_around())


@pytest.fixture
def options(scene, tmp_path) -> MeshOptions:
    return brief_extraction(
        scene,
        tmp_path / "meshes",
        surface_points=40_000,
        poisson=PoissonConfig(poisson_depth=6),
    )


def changed_scene(tmp_path, options, cloud, cameras=None) -> MeshOptions:
    made = write_mesh_scene(tmp_path / "other", cloud, cameras or cameras_around(8))
    return replace(
        options,
        scene_path=made.root,
        checkpoint_path=made.checkpoint,
        coarse_model_path=made.coarse,
    )


def outward_share(mesh: TriangleMesh) -> float:
    """Share of the area whose winding faces away from the origin."""
    normals = doubled_area_normals(mesh.vertices, mesh.faces)
    areas = np.linalg.norm(normals, axis=1)
    centers = mesh.vertices[mesh.faces].mean(axis=1)
    return float(areas[(normals * centers).sum(axis=1) > 0].sum() / areas.sum())


@pytest.mark.slow
@pytest.mark.parametrize("backend", backends())
@pytest.mark.parametrize("project", [True, False])
def test_a_sphere_comes_back_closed_outward_and_coloured(options, backend, project):
    options = replace(
        options,
        meshing_backend=backend,
        project_mesh_on_surface_points=project,
        poisson=PoissonConfig(poisson_depth=5, vertices_density_quantile=0.0),
    )
    (path,) = extract_coarse_mesh(options)
    assert path.name == "sugarmesh_3Dgs30_densityestim02_sdfnorm02_level03_decim3000.ply"
    mesh = read_mesh_ply(path)
    assert 2_000 < mesh.n_faces <= 3_000
    radius = np.linalg.norm(mesh.vertices, axis=1)
    # The level set of discs this thick lies a little outside of the sphere.
    assert abs(np.median(radius) - 1.03) < 0.03
    assert radius.std() < 0.02
    assert outward_share(mesh) > 0.98
    assert ((mesh.normals * mesh.vertices).sum(axis=1) > 0).mean() > 0.98
    assert open_edge_share(mesh) < (0.03 if project else 0.001)
    expected = 0.5 + 0.4 * mesh.vertices / radius[:, None]
    assert np.abs(mesh.colors / 255 - expected).mean() < 0.05
    figures = json.loads(path.with_suffix(".json").read_text())["result"]
    assert figures["backend"] == backend
    assert figures["faces"] == mesh.n_faces


def test_the_share_of_vertices_to_cut_is_that_of_the_original_unless_masks_cut():
    unset = PoissonConfig()
    assert unset.resolved(has_hull=False).vertices_density_quantile == 0.1
    assert unset.resolved(has_hull=True).vertices_density_quantile == 0.0
    given = PoissonConfig(vertices_density_quantile=0.05)
    assert given.resolved(has_hull=True) == given.resolved(has_hull=False) == given


@pytest.mark.parametrize("backend", backends())
def test_tsdf_fusion_finds_the_sphere(options, backend):
    options = replace(
        options,
        mesh_extractor="tsdf",
        meshing_backend=backend,
        tsdf=TsdfConfig(tsdf_voxel_size=0.06),
    )
    (path,) = extract_coarse_mesh(options)
    assert path.name == "sugarmesh_3Dgs30_densityestim02_sdfnorm02_tsdf_decim3000.ply"
    mesh = read_mesh_ply(path)
    radius = np.linalg.norm(mesh.vertices, axis=1)
    # Blended depth is that of the centres of discs, the nearest in front: a little outside.
    assert abs(np.median(radius) - 1.02) < 0.03
    assert radius.std() < 0.03
    assert outward_share(mesh) > 0.98
    assert open_edge_share(mesh) < 0.02


def test_tsdf_voxel_size_is_automatic_and_bounded(options, capsys):
    bounded = replace(options, mesh_extractor="tsdf", tsdf=TsdfConfig(max_voxels=20_000))
    (path,) = extract_coarse_mesh(bounded)
    figures = json.loads(path.with_suffix(".json").read_text())["result"]
    assert figures["foreground_voxels"] <= 20_000
    assert "would be too many" in capsys.readouterr().out
    assert abs(np.median(np.linalg.norm(read_mesh_ply(path).vertices, axis=1)) - 1) < 0.1


@pytest.mark.slow
def test_extraction_is_repeatable_finished_work_is_kept_and_other_work_protected(options, capsys):
    options = coarser(options)
    (path,) = extract_coarse_mesh(options)
    first, made = path.read_bytes(), path.stat().st_mtime_ns
    (again,) = extract_coarse_mesh(options)
    assert again == path
    assert path.stat().st_mtime_ns == made
    assert "exists already" in capsys.readouterr().out
    other = replace(options, surface_points=8_000)
    with pytest.raises(UserError, match="--overwrite True"):
        extract_coarse_mesh(other)
    assert path.read_bytes() == first
    extract_coarse_mesh(replace(other, overwrite=True))
    assert path.read_bytes() != first
    # Levels and targets that are missing are added to those there.
    both = extract_coarse_mesh(replace(other, decimation_targets=(3_000, 500)))
    assert [read_mesh_ply(p).n_faces > 600 for p in both] == [True, False]


@pytest.mark.slow
def test_background_is_meshed_unless_it_is_empty_or_unwanted(tmp_path, options, capsys):
    assert "background: empty" not in capsys.readouterr().out
    options = changed_scene(tmp_path, options, joined(sphere_cloud(), far_wall()))
    (path,) = extract_coarse_mesh(options)
    z = read_mesh_ply(path).vertices[:, 2]
    assert (np.abs(z - 8.9) < 0.5).mean() > 0.1
    options = replace(options, background_mesh=False, mesh_output_dir=tmp_path / "without")
    (path,) = extract_coarse_mesh(options)
    assert np.abs(read_mesh_ply(path).vertices).max() < 1.2


def coarser(options: MeshOptions, **changes) -> MeshOptions:
    """Settings for where it does not matter how good the surface is."""
    solver = PoissonConfig(poisson_depth=4)
    return replace(options, surface_points=10_000, poisson=solver, **changes)


def test_an_empty_background_is_left_out(options, capsys):
    extract_coarse_mesh(coarser(options))
    assert "background: only 0 of" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("backend", backends())
@pytest.mark.parametrize("extractor", ["poisson", "tsdf"])
def test_threads_do_not_change_bits(tmp_path, options, backend, extractor):
    before, results = torch.get_num_threads(), set()
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            (path,) = extract_coarse_mesh(
                replace(
                    options,
                    meshing_backend=backend,
                    mesh_extractor=extractor,
                    surface_points=15_000,
                    mesh_output_dir=tmp_path / str(threads),
                )
            )
            results.add(path.read_bytes())
    finally:
        torch.set_num_threads(before)
    assert len(results) == 1


@pytest.mark.slow
def test_a_box_is_in_world_coordinates_unless_centred_explicitly(tmp_path, options):
    # The cameras stand around (0, 0, 1.75) on average: only the upper half of the ring.
    cameras = [camera for camera in cameras_around(28) if camera.center[2] > 0]
    options = changed_scene(tmp_path, options, sphere_cloud(), cameras)
    box = {"bboxmin": (-2.0, -2.0, 0.4), "bboxmax": (2.0, 2.0, 2.0)}
    (path,) = extract_coarse_mesh(replace(options, background_mesh=False, random_seed=1, **box))
    assert read_mesh_ply(path).vertices[:, 2].min() > 0.3
    shifted = {"bboxmin": (-2.0, -2.0, 0.4 - 1.75), "bboxmax": (2.0, 2.0, 0.25)}
    (path,) = extract_coarse_mesh(
        replace(
            options,
            background_mesh=False,
            center_bbox=True,
            mesh_output_dir=tmp_path / "c",
            **shifted,
        )
    )
    assert read_mesh_ply(path).vertices[:, 2].min() > 0.1


def test_failures_say_what_to_do(tmp_path, options):
    def fails(message: str, **changes) -> None:
        with pytest.raises(UserError, match=message):
            extract_coarse_mesh(replace(options, **changes))
        assert not list(options.directory.glob("*.ply"))

    far = {"bboxmin": (50.0, 50.0, 50.0), "bboxmax": (60.0, 60.0, 60.0)}
    fails("holds 0 of .* surface points; they lie in", **far)
    fails("holds 0 of", bboxmin=(-0.2, -0.2, -0.2), bboxmax=(0.2, 0.2, 0.2))
    fails(
        "no surface in the box", mesh_extractor="tsdf", tsdf=TsdfConfig(tsdf_voxel_size=0.1), **far
    )
    fails("without --bboxmax", bboxmin=(0.0, 0.0, 0.0))
    fails("is not below", bboxmin=(0.0, 0.0, 0.0), bboxmax=(1.0, 0.0, 1.0))
    fails("must lie between 0 and 1", surface_levels=(1.0,))
    fails("coarse_model_path is missing", coarse_model_path=None)
    fails("no such file", coarse_model_path=tmp_path / "x.pt")
    damaged = tmp_path / "sugarcoarse_x" / "1.pt"
    damaged.parent.mkdir()
    damaged.write_bytes(options.coarse_model_path.read_bytes()[:5_000])
    fails("damaged", coarse_model_path=damaged)


def test_a_transparent_model_is_a_user_error(tmp_path, options):
    with pytest.raises(UserError, match="no Gaussian has an opacity above 0.5"):
        extract_coarse_mesh(changed_scene(tmp_path, options, sphere_cloud(opacity=0.4)))


def test_a_model_that_no_camera_sees_is_a_user_error(tmp_path, options):
    cloud = sphere_cloud()
    cloud.means += torch.tensor([0.0, 0.0, 500.0])
    with pytest.raises(UserError, match="only 0 surface points"):
        extract_coarse_mesh(changed_scene(tmp_path, options, cloud))


@pytest.mark.slow
def test_vanilla_gaussians_can_be_meshed(options):
    options = replace(options, use_vanilla_3dgs=True, coarse_model_path=None)
    (path,) = extract_coarse_mesh(options)
    assert path.name == "sugarmesh_vanilla3dgs_level03_decim3000.ply"


def test_a_backend_that_cannot_be_imported_is_replaced_or_reported(monkeypatch):
    monkeypatch.setitem(sys.modules, "open3d", None)
    assert choose_backend("auto").name == "pycolmap"
    with pytest.raises(UserError, match="Open3D cannot be imported"):
        choose_backend("open3d")


def test_open3d_is_taken_where_it_can_be_imported(monkeypatch):
    quiet = SimpleNamespace(
        set_verbosity_level=lambda level: None, VerbosityLevel=SimpleNamespace(Error=0)
    )
    monkeypatch.setitem(sys.modules, "open3d", SimpleNamespace(utility=quiet))
    assert choose_backend("auto").name == "open3d"
    assert choose_backend("pycolmap").name == "pycolmap"


@pytest.mark.slow
@pytest.mark.parametrize("backend", backends())
def test_backends_keep_colours_and_order_densities_by_support(backend, separate_process):
    points = sphere_points(4_000).astype(np.float32)
    dense = np.concatenate([points, *[points[points[:, 2] > 0]] * 6])
    noise = np.random.default_rng(0).normal(0, 2e-3, dense.shape)
    samples = SurfaceSamples(
        (dense + noise + 100).astype(np.float32),
        dense,
        ((dense * 0.5 + 0.5) * 255).astype(np.uint8),
    )
    tool = choose_backend(backend)
    mesh, densities = tool.reconstruct(samples, PoissonConfig(poisson_depth=6), print)
    local = mesh.vertices - 100
    assert np.abs(np.linalg.norm(local, axis=1) - 1).max() < 0.05
    assert outward_share(replace(mesh, vertices=local)) == 1
    assert densities[local[:, 2] > 0.3].mean() > densities[local[:, 2] < -0.3].mean()
    assert np.abs(mesh.colors / 255 - local / 2 - 0.5).mean() < 0.05


def test_outliers_are_points_far_from_their_neighbours():
    points = np.concatenate([sphere_points(3_000), [[9.0, 9.0, 9.0]]]).astype(np.float32)
    mask = outlier_mask(points)
    assert mask.nonzero()[0].tolist() == [3_000]


def test_marching_cubes_closes_a_sphere_over_many_blocks():
    table = torch.arange(64).int().reshape(4, 4, 4)
    local = torch.stack(torch.meshgrid(*[torch.arange(8)] * 3, indexing="ij"), -1).reshape(-1, 3)
    corners = ((table >= 0).nonzero()[:, None] * 8 + local).reshape(-1, 3).float()
    distances = (corners - 15.3).norm(dim=-1) - 9.2
    field = SparseField(
        (1.0, 2.0, 3.0), 0.1, table, distances, torch.ones(len(corners)), corners / 32
    )
    mesh = extract_surface(field)
    centered = mesh.vertices - np.array([2.53, 3.53, 4.53])
    assert open_edge_share(mesh) == 0
    assert np.abs(np.linalg.norm(centered, axis=1) - 0.92).max() < 2e-3
    assert outward_share(replace(mesh, vertices=centered)) == 1
    assert np.abs(mesh.colors / 255 - (centered + 1.53) / 3.2).max() < 4e-3
    two = merge_meshes([mesh, TriangleMesh(np.eye(3), np.array([[0, 1, 2]]), mesh.colors[:3])])
    assert without_small_components(two, 2).n_faces == mesh.n_faces
    unseen = replace(field, weights=torch.zeros(len(corners)))
    assert extract_surface(unseen).n_faces == 0


def test_points_on_the_faces_of_a_box_are_outside():
    box = Box((0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
    points = np.array([[0.5, 0.5, 0.5], [1.0, 0.5, 0.5], [0.5, 0.0, 0.5]], np.float32)
    assert box.contains(points).tolist() == [True, False, False]


def test_the_command_line_fills_every_option(tmp_path):
    words = "-s scene -c vanilla -m a/b.pt -l 0.4 -d 1_000 --tsdf_depth plane"
    words += " --bboxmin -1,-2,-3 -B (1,2,3)"
    made = mesh_options(parser_of(None, MeshOptions).parse_flags(words.split()))
    assert made.surface_levels == (0.4,)
    assert made.decimation_targets == (1_000,)
    assert made.bboxmin == (-1, -2, -3)
    assert made.center_bbox is None
    assert made.tsdf.tsdf_depth == "plane"
    default = mesh_options(
        parser_of(None, MeshOptions).parse_flags(["-s", "s", "-c", "c", "--device", "cpu"])
    )
    assert default == MeshOptions(scene_path=Path("s"), checkpoint_path=Path("c"))


@pytest.mark.parametrize("flag", ["--use_marching_cubes", "--use_centers_to_extract_mesh"])
def test_ablations_of_the_original_are_refused_in_one_line(flag):
    parser, words = parser_of(None, MeshOptions), ["-s", "s", "-c", "c", flag]
    assert mesh_options(parser.parse_flags([*words, "False"]))
    with pytest.raises(UserError, match=f"{flag}: .* --mesh_extractor tsdf"):
        mesh_options(parser.parse_flags([*words, "True"]))


def test_the_entry_point_reports_errors_in_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "s").mkdir()
    error = refusal(capsys, extract_mesh.main, "-s", "s", "-c", "none", "-m", "m.pt")
    assert error.startswith("error: m.pt: no such file")
    assert len(error.splitlines()) == 1


@pytest.mark.slow
def test_surface_without_points_nearby_is_cut_away_unless_it_shall_be_closed():
    points = sphere_points(4_000)
    half = points[points[:, 2] > 0].astype(np.float32)
    samples = SurfaceSamples(half, half, np.full(half.shape, 128, np.uint8))
    config = PoissonConfig(poisson_depth=5, vertices_density_quantile=0.01)
    cell = cell_size(half, config.poisson_depth)

    def farthest(config: PoissonConfig) -> float:
        mesh = reconstruct_region(samples, config, PycolmapBackend())
        return gaps(mesh.vertices, half).max() / cell

    assert farthest(config) <= config.max_gap
    assert farthest(replace(config, max_gap=0.0)) > config.max_gap
    assert farthest(replace(config, vertices_density_quantile=0.0)) > config.max_gap


def test_a_handful_of_background_points_makes_no_background(options, capsys, monkeypatch):
    monkeypatch.setattr(surfaces, "MIN_BACKGROUND_SHARE", 0.5)
    monkeypatch.setattr(loading, "BACKGROUND_HALF_SIDE", 40.0)
    extract_coarse_mesh(coarser(options))
    assert "background: only" in capsys.readouterr().out


def test_lack_of_memory_in_meshing_names_what_asks_for_less(monkeypatch):
    def fail(points):
        raise MemoryError("std::bad_alloc")

    monkeypatch.setattr("sugar_extractors.mesh.meshing_backends._cube_of", fail)
    points = np.zeros((64, 3), np.float32)
    samples = SurfaceSamples(points, points, np.zeros((64, 3), np.uint8))
    with pytest.raises(UserError, match="out of memory in mesh extraction") as caught:
        PycolmapBackend().reconstruct(samples, PoissonConfig(), print)
    assert "--surface_points" in str(caught.value)
