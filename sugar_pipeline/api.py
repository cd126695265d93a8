# SPDX-License-Identifier: Apache-2.0
"""The program as functions: the pipeline, its stages, reading and rendering.

The keywords of a function are the flags of its command. It prints what the command prints, and
raises :class:`~sugar_utils.errors.UserError` where the command would end with an error. With a
further keyword ``progress``, a function that is called with the name of a loop, its iteration and
its last one, nothing is printed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gaussian_splatting.core.cloud import Gaussians
from gaussian_splatting.data.cameras import Camera
from gaussian_splatting.rasterization import RenderOutput, rasterize
from gaussian_splatting.scenes.scene import Scene
from gaussian_splatting.scenes.scene import load_scene as read_scene
from sugar_extractors.export.reading import read_gaussians_in_scene
from sugar_pipeline.command_line import PROGRAMS
from sugar_pipeline.pipeline.pipeline_result import PipelineResult
from sugar_trainers.capture import SugarSize
from sugar_utils.console import Console, Listener
from sugar_utils.errors import say_nothing
from sugar_utils.files import without_none

PathLike = str | Path


def run(scene: PathLike, *, progress: Listener | None = None, **flags: object) -> PipelineResult:
    """Make a textured mesh of photographs, a video or a scene, as ``sugar run``.

    The result has the files of the folder of results, which people take away, and those that the
    stages left in the world of the scene.

    >>> result = run("scan", gs_output_dir="gaussians", low_poly=True, **small)
    >>> [path.name for path in result.files if path.suffix in (".obj", ".ply", ".html")]
    ['mesh.obj', 'splats.ply', 'index.html', 'report.html']
    >>> result.mesh.suffix, result.report.name
    ('.obj', 'report.html')
    """
    return _call("train_full_pipeline.py", progress, scene_path=scene, **flags)


def train_vanilla(
    scene: PathLike, output: PathLike, *, progress: Listener | None = None, **flags: object
) -> Path:
    """Train vanilla 3DGS, as ``sugar vanilla``; return the PLY of its last iteration.

    >>> steps = []
    >>> ply = train_vanilla("scan", "out", iterations=7, progress=lambda *step: steps.append(step))
    >>> ply.as_posix(), steps[-1]
    ('out/point_cloud/iteration_7/point_cloud.ply', ('vanilla', 7, 7))
    """
    return _call(
        "gaussian_splatting/train.py", progress, source_path=scene, model_path=output, **flags
    )


def train_coarse(
    scene: PathLike,
    checkpoint: PathLike,
    mode: str = "multiview",
    *,
    progress: Listener | None = None,
    **flags: object,
) -> Path:
    """Align Gaussians with the surface, as ``train_coarse_MODE.py``; return the ``.pt``.

    >>> coarse = train_coarse("scan", "gaussians", "sdf", schedule_scale=0.0005, **small)
    >>> coarse.name
    '8.pt'
    """
    name = f"train_coarse_{mode}.py"
    return _call(name, progress, scene_path=scene, checkpoint_path=checkpoint, **flags)


def extract_mesh(
    scene: PathLike,
    checkpoint: PathLike,
    coarse: PathLike,
    *,
    progress: Listener | None = None,
    **flags: object,
) -> Path:
    """Extract the mesh of a coarse model, as ``sugar mesh``; return the PLY.

    >>> mesh = extract_mesh("scan", "gaussians", coarse, poisson_depth=5, **small)
    >>> mesh.suffix
    '.ply'
    """
    inputs = {"scene_path": scene, "checkpoint_path": checkpoint, "coarse_model_path": coarse}
    return _call("extract_mesh.py", progress, **inputs, **flags)[0]


def refine(
    scene: PathLike,
    checkpoint: PathLike,
    mesh: PathLike,
    *,
    progress: Listener | None = None,
    **flags: object,
) -> Path:
    """Refine a mesh and the Gaussians bound to it, as ``sugar refine``; return the ``.pt``.

    >>> refined = refine("scan", "gaussians", mesh, refinement_iterations=4, **small)
    >>> refined.name
    '4.pt'
    """
    inputs = {"scene_path": scene, "checkpoint_path": checkpoint, "mesh_path": mesh}
    return _call("train_refined.py", progress, **inputs, **flags)


def bake_texture(
    scene: PathLike,
    checkpoint: PathLike,
    refined: PathLike,
    *,
    progress: Listener | None = None,
    **flags: object,
) -> Path:
    """Bake the texture of a refined model, as ``sugar texture``; return the OBJ.

    >>> bake_texture("scan", "gaussians", refined, **small).suffix
    '.obj'
    """
    inputs = {"scene_path": scene, "checkpoint_path": checkpoint, "refined_model_path": refined}
    return _call("extract_refined_mesh_with_texture.py", progress, **inputs, **flags)


def load_scene(path: PathLike, **options: Any) -> Scene:
    """Read the scene of a folder; options: see ``gaussian_splatting.scenes.scene``.

    >>> scene = load_scene("scan")
    >>> len(scene.train_cameras), len(scene.test_cameras)
    (8, 2)
    """
    options.setdefault("size_rule", SugarSize())
    options.setdefault("notify", say_nothing)
    return read_scene(path, **options)


def load_gaussians(path: PathLike) -> Gaussians:
    """Read Gaussians of a file or folder that ``sugar export`` reads, for :func:`render`.

    >>> tuple(load_gaussians("gaussians").means.shape)
    (200, 3)
    """
    return read_gaussians_in_scene(Path(path), say_nothing).activate()


def render(gaussians: Gaussians, camera: Camera, **channels: Any) -> RenderOutput:
    """Render colour, and further channels such as depth; differentiable. See ``rasterize``.

    >>> camera = load_scene("scan").test_cameras[0]
    >>> output = render(load_gaussians("gaussians"), camera, depth=True)
    >>> output.image.shape == (camera.height, camera.width, 3)
    True
    """
    return rasterize(gaussians, camera, **channels)


def _call(script: str, progress: Listener | None, **flags: object) -> Any:
    """Run a program with flags as keywords; None is a flag that is not given."""
    program = PROGRAMS[script]
    parser = program.make_parser(None)
    parsed = parser.parse_flags([], without_none(flags))
    if progress is None:
        # Programs without training have nothing to leave out.
        console = Console(verbose=parsed.get("verbose", True))
    else:
        console = Console.silent(progress)
    return program.call(parsed, console=console)
