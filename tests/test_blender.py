# SPDX-License-Identifier: Apache-2.0
"""The extension in Blender: scans stand where they should, look as ours, and go back edited.

Blender is the package ``bpy``, in this Python or in the one that the variable BLENDER_PYTHON names.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from blender.build import build
from gaussian_splatting.core.cloud import GaussianCloud
from gaussian_splatting.core.moved import GLB_AXES, moved_cloud
from gaussian_splatting.data.cameras import Camera
from gaussian_splatting.formats.fidelity import fidelity
from gaussian_splatting.scenes.scene import Scene, VanillaSize, load_scene
from sugar_extractors.export.reading import read_as_written
from sugar_extractors.export.reposing import reposed
from sugar_extractors.outputs.result_folder import FinalResults, write_result_folder
from sugar_extractors.placing import PlacementOptions
from sugar_scene.bound_model import bound_cloud_from_state
from sugar_scene.geometry import covariances
from sugar_scene.mesh_files.textured_mesh_io import (
    TexturedMesh,
    render_textured,
    write_textured_mesh,
)
from tests.support.refined_models import refined_state, save_model
from tests.support.tiny_scene import REPOSITORY, SHORT_PIPELINE, make_tiny_scene, run_cli
from tests.support.verbs import export

SESSION = Path(__file__).parent / "support" / "blender_session.py"
N_FACES = 20
N_DELETED = 3
LIFT = 0.25
PEAK = 255.0


def blender_python() -> str | None:
    """The interpreter that has bpy."""
    if "BLENDER_PYTHON" in os.environ:
        return os.environ["BLENDER_PYTHON"]
    return sys.executable if importlib.util.find_spec("bpy") else None


pytestmark = pytest.mark.skipif(blender_python() is None, reason="needs the package bpy")


class Scan:
    """A folder of results of the tiny scene, and what it was made of."""

    def __init__(self, root: Path, options: PlacementOptions) -> None:
        self.root = root
        tiny = make_tiny_scene(root / "capture", zoom=2)
        self.scene: Scene = load_scene(
            tiny.root, size_rule=VanillaSize(1), notify=lambda line: None
        )
        self.bound = bound_cloud_from_state(refined_state())
        rng = torch.Generator().manual_seed(0)
        coarse = torch.rand(1, 3, 6, 6, generator=rng)
        picture = torch.nn.functional.interpolate(coarse, size=(64, 64), mode="bicubic")
        self.mesh = TexturedMesh(
            vertices=self.bound.vertices,
            faces=self.bound.faces,
            uvs=torch.rand(N_FACES, 3, 2, generator=rng),
            texture=(255 * picture[0].permute(1, 2, 0).clamp(0, 1)).byte(),
        )
        write_textured_mesh(root / "refined.obj", self.mesh, glb=False)
        model = save_model(root, refined_state())
        made = FinalResults(root / "refined.obj", model, self.bound.to_gaussians)
        self.folder = root / "scan"
        write_result_folder(self.folder, made, self.scene, options)
        record = json.loads((self.folder / "transform.json").read_text())
        self.matrix = np.array(record["matrix"])
        self.up = record["up"]

    @property
    def camera(self) -> Camera:
        """A camera of the scene, with a principal point beside the middle."""
        return self.scene.calibrated_cameras[3]

    def session(self, *steps: tuple[str, dict]) -> list:
        """Results of steps of ``blender_session.py``, after the extension was installed."""
        package = build(self.root)
        program = {"python": sys.executable, "folder": str(REPOSITORY)}
        work = self.root / "work.json"
        work.write_text(json.dumps([("install", {"package": str(package), **program}), *steps]))
        python = blender_python()
        assert python is not None
        finished = subprocess.run(
            [python, str(SESSION), str(work)],
            env=os.environ | {"BLENDER_USER_RESOURCES": str(self.root / "blender")},
            capture_output=True,
            text=True,
            timeout=300,
        )
        lines = [one for one in finished.stdout.splitlines() if one.startswith("RESULTS ")]
        assert lines, finished.stdout + finished.stderr
        return json.loads(lines[-1].removeprefix("RESULTS "))[1:]

    def loaded(self, **options: object) -> tuple[str, dict]:
        """The step that imports the scan."""
        return "load", {"directory": str(self.folder), **options}


PLACES = {
    "upright": PlacementOptions(scale_factor=1.5),
    "as captured": PlacementOptions(orient="none"),
}


@pytest.fixture(scope="module", params=PLACES)
def scan(request, tmp_path_factory) -> Scan:
    return Scan(tmp_path_factory.mktemp("blender"), PLACES[request.param])


@pytest.fixture(scope="module")
def upright(tmp_path_factory) -> Scan:
    return Scan(tmp_path_factory.mktemp("blender"), PLACES["upright"])


def psnr(a: np.ndarray, b: np.ndarray) -> float:
    return float(10 * np.log10(PEAK**2 / np.mean((a - b) ** 2)))


def shapes(cloud: GaussianCloud) -> torch.Tensor:
    """Covariances of Gaussians. (N, 3, 3)"""
    quats = torch.nn.functional.normalize(cloud.quats.double(), dim=1)
    return covariances(quats, cloud.log_scales.double().exp())


def on_black(path: Path) -> np.ndarray:
    """A picture before black. (H, W, 3)"""
    pixels = np.asarray(Image.open(path).convert("RGBA"), np.float64)
    return pixels[..., :3] * pixels[..., 3:] / 255


def test_cycles_renders_the_mesh_as_we_do(scan, tmp_path):
    cameras = scan.scene.calibrated_cameras[:4]
    renders = [
        ("render", {"camera": camera.name, "target": str(tmp_path / camera.name)})
        for camera in cameras
    ]
    scan.session(scan.loaded(), *renders)
    for camera in cameras:
        ours = 255 * render_textured(scan.mesh, camera, supersampling=8).numpy()
        theirs = on_black(tmp_path / camera.name)
        assert theirs.shape == ours.shape
        is_covered = (ours > 0).any(axis=2) | (theirs > 0).any(axis=2)
        assert 0.1 < is_covered.mean() < 0.9
        assert psnr(ours[is_covered], theirs[is_covered]) > 30


def test_the_package_passes_blenders_own_check(upright, tmp_path):
    package = build(tmp_path)
    ((code, text),) = upright.session(("validate", {"package": str(package)}))
    assert code == 0, text


def test_what_is_upright_stands_on_zero_with_z_up(upright):
    steps = [upright.loaded(), ("world_box", {"name": "scan mesh"})]
    objects, (low, high) = upright.session(*steps)
    vertices = upright.mesh.vertices.double().numpy() @ upright.matrix[:3, :3].T
    sizes = np.ptp(vertices, axis=0)
    np.testing.assert_allclose(np.subtract(high, low), sizes[[0, 2, 1]], atol=1e-5)
    assert low[2] == pytest.approx(0, abs=1e-5)
    assert ["scan", "EMPTY"] in objects
    n_cameras = sum(kind == "CAMERA" for _, kind in objects)
    assert n_cameras == len(upright.scene.calibrated_cameras)


def test_photographs_are_behind_their_cameras(upright):
    camera = upright.camera
    _, files = upright.session(upright.loaded(), ("background_files", {"camera": camera.name}))
    assert [Path(file).resolve() for file in files] == [camera.image_file.resolve()]


def test_gaussians_come_as_points_and_as_ellipses_where_the_mesh_is(upright):
    n_gaussians = len(upright.bound)
    points, attributes, box = upright.session(
        upright.loaded(gaussians="POINTS"),
        ("attributes", {"name": "scan Gaussians"}),
        ("world_box", {"name": "scan mesh"}),
    )
    assert ["scan Gaussians", "MESH"] in points
    for name in ("radius", "gaussian_color", "opacity", "scale", "rotation"):
        assert attributes[name] == n_gaussians
    _, ellipses = upright.session(
        upright.loaded(gaussians="ELLIPSES", max_gaussians=50),
        ("world_box", {"name": "scan Gaussians"}),
    )
    middle = np.mean(box, axis=0)
    np.testing.assert_allclose(np.mean(ellipses, axis=0), middle, atol=0.3)


@pytest.mark.parametrize("kind", ["ply", "spz"])
def test_gaussians_follow_a_posed_mesh_and_leave_with_deleted_triangles(kind, scan, tmp_path):
    """The scan as a whole was moved, too, which is no edit."""
    target = tmp_path / f"edited.{kind}"
    *_, mode = scan.session(
        scan.loaded(),
        ("move", {"name": "scan", "offset": [3, 4, 5]}),
        ("pose_and_delete", {"name": "scan mesh", "lift": LIFT, "n_deleted": N_DELETED}),
        ("export_edited", {"filepath": str(target)}),
    )
    assert mode == "EDIT"
    moved = scan.mesh.vertices.double().numpy() @ scan.matrix[:3, :3].T + scan.matrix[:3, 3]
    heights = moved[:, 1].astype(np.float32)
    is_high = heights > (heights.min() + heights.max()) / 2
    moved[is_high, 1] += LIFT
    back = np.linalg.inv(scan.matrix)
    edited = torch.from_numpy(moved @ back[:3, :3].T + back[:3, 3])
    expected = moved_cloud(reposed(scan.bound, edited).to_gaussians(), scan.matrix)
    first = N_DELETED * scan.bound.per_triangle
    expected = expected.select(torch.arange(first, len(expected)))
    found = read_as_written(target, lambda line: None)
    if kind == "spz" and scan.up is None:
        expected = moved_cloud(expected, GLB_AXES)
    assert fidelity(expected, found).position < (1e-5 if kind == "ply" else 1e-3)
    # Round Gaussians have axes in any direction, and SPZ rounds sizes to a sixteenth of an octave.
    share = 1e-4 if kind == "ply" else 0.08
    tolerance = share * float(shapes(expected).max())
    torch.testing.assert_close(shapes(found), shapes(expected), atol=tolerance, rtol=0)


def test_what_no_gaussians_can_follow_is_one_line(upright, tmp_path):
    target = str(tmp_path / "a.ply")
    _, _, wrong_type, _, new_vertices, no_folder = upright.session(
        upright.loaded(),
        ("activate", {"name": "scan mesh"}),
        ("error_of", {"operator": "export_edited", "filepath": str(tmp_path / "a.xyz")}),
        ("subdivide", {"name": "scan mesh"}),
        ("error_of", {"operator": "export_edited", "filepath": target}),
        ("error_of", {"operator": "import_result", "directory": str(tmp_path)}),
    )
    assert ".ply or .spz" in wrong_type
    assert "has new vertices" in new_vertices
    assert "has no transform.json" in no_folder
    assert not list(tmp_path.iterdir())


LINES = """
import time
print("stage 1 of 2: refinement", flush=True)
print("refinement 50/100 5.0 it/s eta 0:10", flush=True)
time.sleep({seconds})
print("stage 2 of 2: texture", flush=True)
raise SystemExit({code})
"""


@pytest.mark.parametrize(
    ("seconds", "code", "stops", "last", "report"),
    [
        (0.5, 0, False, "FINISHED", ["FINISHED", "2 of 2: texture"]),
        (0.5, 3, False, "CANCELLED", ["ERROR", "the program ended with code 3"]),
        (600, 0, True, "CANCELLED", ["INFO", "stopped; the same run goes on from where it was"]),
    ],
    ids=["done", "failed", "stopped"],
)
def test_a_window_shows_how_far_a_run_is(seconds, code, stops, last, report, upright):
    script = LINES.format(seconds=seconds, code=code)
    command = [sys.executable, "-c", script]
    (watched,) = upright.session(("watch", {"command": command, "stops": stops}))
    assert watched["answers"] == ["RUNNING_MODAL", "PASS_THROUGH", last]
    assert "1 of 2: refinement, 50% (0:10 left)" in watched["texts"]
    assert watched["reports"] == [report]
    assert watched["timers"] == 0


def test_a_file_that_was_saved_during_a_run_opens_without_one(upright, tmp_path):
    assert upright.session(("reopen", {"path": str(tmp_path / "a.blend")})) == [False]


def test_blender_opens_one_file_with_both_as_a_mesh_and_points(upright, tmp_path):
    target = tmp_path / "a.both.glb"
    assert run_cli(export.main, upright.folder, "--to", "glb_both", "-o", target) == 0
    (meshes,) = upright.session(("import_gltf", {"filepath": str(target)}))
    by_name = {name: (n_vertices, n_polygons) for name, n_vertices, n_polygons in meshes}
    assert by_name["Mesh"][1] == N_FACES
    assert by_name["Gaussians"] == (len(upright.bound), 0)


@pytest.mark.slow
def test_a_run_in_the_background_ends_with_its_scan_imported(upright, tmp_path):
    options = {"source": str(upright.scene.root), "output": str(tmp_path / "out")}
    words = (*SHORT_PIPELINE, "--vanilla_iterations", 150_000, "-B", "2,2,2")
    flags = shlex.join([*map(str, words), "--bboxmin", "(-2,-2,-2)"])
    (names,) = upright.session(("run_scan", {**options, "more": flags}))
    assert upright.scene.root.name in names
    assert f"{upright.scene.root.name} mesh" in names


def test_errors_of_the_program_reach_the_user(upright, tmp_path):
    (tmp_path / "empty").mkdir()
    options = {"source": str(tmp_path / "empty"), "output": str(tmp_path / "out")}
    (message,) = upright.session(("error_of", {"operator": "run", **options}))
    assert str(tmp_path / "empty") in message
