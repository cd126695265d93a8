# SPDX-License-Identifier: Apache-2.0
"""The settings of a mesh extraction, with the defaults of SuGaR."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from gaussian_splatting.engine.run_directory import RUN_FILE
from gaussian_splatting.shared_flags import Preset, preset
from sugar_extractors.mesh.fusion.tsdf import TsdfConfig
from sugar_extractors.mesh.holes.hole_filling import MODES as FILLING_MODES
from sugar_extractors.mesh.meshing_backends import BACKENDS, FUSED, PoissonConfig
from sugar_trainers.capture import CaptureOptions, model_file
from sugar_trainers.naming import (
    COARSE_MESH_FOLDER,
    number_text,
    stage_folder,
)
from sugar_utils import flags
from sugar_utils.errors import UserError
from sugar_utils.flags import FlagValues
from sugar_utils.schemas import RunRecord, read_checked
from sugar_utils.settings import flag, from_args

# Extractor of a mesh, as part of file names; empty for level sets and Poisson, the last two by
# the original only.
MeshVariant = Literal["", "tsdf", "tetrahedra", "poissoncenters", "marchingcubes"]
COARSE_FLAG = "--coarse_model_path"
OUTPUT_FLAG = "--mesh_output_dir"
REFINEMENT_MODES = (flags.AUTO, "none")
EXTRACTORS = ("poisson", "tsdf", "tetrahedra")
ABLATIONS = ("use_centers_to_extract_mesh", "use_marching_cubes")
SURFACE_LEVELS = (0.1, 0.3, 0.5)
DECIMATION_TARGETS = (200_000, 1_000_000)
MOST_POINTS = 10_000_000
POINTS_PER_TRIANGLE = 10
Vector = tuple[float, float, float]
_flag = partial(flag, group="surface")

_points = partial(flag, group="surface", no_effect_when=FUSED)
_alone = partial(flag, group="only extract_mesh.py")


@dataclass(frozen=True, kw_only=True)
class MeshOptions(CaptureOptions):
    """A mesh extraction; the defaults are those of SuGaR.

    Held-out views give no surface points. Of the vanilla checkpoint only the cameras are used,
    unless it is meshed itself.
    """

    coarse_model_path: Path | None = _alone(
        None, ".pt of a coarse run, or its folder", short="-m", parse=Path
    )
    use_vanilla_3dgs: bool = _alone(False, "mesh the vanilla Gaussians themselves")
    mesh_output_dir: Path | None = _alone(
        None, "folder of the meshes; unset: output/coarse_mesh/<scene>", short="-o", parse=Path
    )
    surface_levels: tuple[float, ...] = _alone(
        SURFACE_LEVELS,
        f"density of the surface; unset: {SURFACE_LEVELS}, a mesh each",
        short="-l",
        long="--surface_level",
        unset=True,
        parse=lambda text: (flags.non_negative_float(text),),
        no_effect_when=FUSED,
    )
    decimation_targets: tuple[int, ...] = _alone(
        DECIMATION_TARGETS,
        f"triangles of the foreground and of the background; unset: "
        f"{DECIMATION_TARGETS}, a mesh each",
        short="-d",
        long="--decimation_target",
        unset=True,
        parse=lambda text: (flags.positive_int(text),),
    )
    mesh_extractor: str = _flag(
        "poisson",
        "poisson: level sets and screened Poisson, as in the paper; tsdf: fusion of "
        "rendered depth on voxels; tetrahedra: the same between points that the Gaussians give, "
        "for thin parts; unset: tsdf of a multiview model, else poisson",
        choices=EXTRACTORS,
        modes={"multiview": "tsdf"},
    )
    watertight: bool = _flag(
        False,
        "close the surface where no view looked: of tsdf and tetrahedra by Poisson of what was "
        "fused in the foreground, of poisson by cutting nothing away",
    )
    fill_holes: str = _flag(
        flags.AUTO,
        "auto: close small holes where no view looked, if three views show the place, by the "
        "smoothest surface that no mask and no depth contradicts; only with --tsdf_depth plane; "
        "none: leave them open",
        choices=FILLING_MODES,
        no_effect_when="with --mesh_extractor poisson; with --watertight True",
    )
    photometric_refinement: str = _flag(
        flags.AUTO,
        "auto: move the vertices of fused depth until the photographs agree, before decimation; "
        "none: leave them where the depth is",
        choices=REFINEMENT_MODES,
        no_effect_when="with --mesh_extractor poisson; without photographs",
    )
    remove_unseen: bool = _flag(
        False,
        "remove triangles that no training view sees, such as surfaces inside an object; "
        "unset: False, True with --preset fast",
        parse=flags.boolean,
        modes={"fast": True},
        no_effect_when="with --watertight True",
    )
    mesh_error: float | None = _flag(
        None,
        "leave only as many triangles as keep the surface within so many pixels of the "
        "nearest photograph; unset: as many as asked for",
        parse=flags.positive_float,
    )
    triangle_pixels: float = _flag(
        0.0,
        "split triangles that cover more pixels of a photograph, largest first, into as many "
        "as asked for at most, of which decimation leaves half; 0: none; unset: 0, 6 with --preset "
        "fast",
        parse=flags.non_negative_float,
        modes={"fast": 6.0},
        no_effect_when="with --mesh_error",
    )
    project_mesh_on_surface_points: bool = _points(
        True, "snap the vertices of the decimated Poisson mesh to the surface points"
    )
    bboxmin: Vector | None = _flag(
        None,
        "low corner of the foreground in world coordinates; unset: a cube around the cameras",
        short="-b",
        parse=flags.vector3,
        metavar="(X,Y,Z)",
        task="result",
    )
    bboxmax: Vector | None = _flag(
        None,
        "high corner of the foreground",
        short="-B",
        parse=flags.vector3,
        metavar="(X,Y,Z)",
        task="result",
    )
    center_bbox: bool | None = _flag(
        None,
        "move the foreground box by the mean camera centre; unset: only the default cube",
        parse=flags.boolean,
    )
    background_mesh: bool = _flag(True, "mesh what lies outside the foreground, too")
    surface_points: flags.Automatic = _points(
        MOST_POINTS,
        "points sampled on the surface, per level; auto: 10 for each triangle that is "
        "kept, at most 10000000; unset: 10000000, auto with --preset fast",
        parse=flags.positive_or_auto,
        metavar="{N,auto}",
        modes={"fast": flags.AUTO},
    )
    poisson: PoissonConfig = field(default_factory=PoissonConfig)
    tsdf: TsdfConfig = field(default_factory=TsdfConfig)
    meshing_backend: str = _flag(
        "auto",
        "library for Poisson; auto: Open3D where it can be imported",
        choices=BACKENDS,
    )
    preset: Preset = preset("only extract_mesh.py")
    random_seed: int = _alone(0, "seed of the choice of pixels")
    overwrite: bool = _alone(False, "replace meshes that were made with other settings")
    use_centers_to_extract_mesh: bool = _alone(
        False, "ablation of the paper, not offered: True is an error"
    )
    use_marching_cubes: bool = _alone(
        False,
        "ablation of the paper, not offered: True is an error; --mesh_extractor tsdf gives "
        "a surface without Poisson",
    )

    def __post_init__(self) -> None:
        flags.require_box(self.bboxmin, self.bboxmax)
        for name in ABLATIONS:
            if getattr(self, name):
                raise UserError(
                    f"--{name}: this ablation of the paper is not offered, its surfaces are worse; "
                    "leave it out, or pass --mesh_extractor tsdf for a surface without Poisson"
                )

    @property
    def n_surface_points(self) -> int:
        """Surface points of a level; ``auto`` follows from the largest number of triangles."""
        if self.surface_points == flags.AUTO:
            return min(MOST_POINTS, POINTS_PER_TRIANGLE * max(self.decimation_targets))
        return self.surface_points

    @property
    def directory(self) -> Path:
        """The folder of the meshes."""
        return self.mesh_output_dir or stage_folder(COARSE_MESH_FOLDER, self.scene_path)

    def mesh_path(self, level: float, target: int) -> Path:
        """Return the file of the mesh of a level and a number of triangles."""
        model = "vanilla3dgs"
        path = self.coarse_model_path
        if not self.use_vanilla_3dgs and path is not None:
            folder = path if path.is_dir() else path.resolve().parent
            model = folder.resolve().name.removeprefix("sugarcoarse_")
        return self.directory / mesh_name(model, level, target, variant_of(self.mesh_extractor))

    @property
    def is_fused(self) -> bool:
        """Whether meshes are made of fused depth."""
        return self.mesh_extractor != "poisson"

    @property
    def reads_tracks(self) -> bool:
        """Whether a mesh depends on which points the images observe."""
        planes = self.tsdf.tsdf_depth == "plane"
        return self.is_fused and (planes or self.tsdf.margin is not None)

    @property
    def fills_holes(self) -> bool:
        """Whether small holes are filled, which needs depth of planes."""
        has_planes = self.is_fused and self.tsdf.tsdf_depth == "plane"
        return self.fill_holes == flags.AUTO and has_planes and not self.watertight

    @property
    def refines_vertices(self) -> bool:
        """Whether photographs move the vertices."""
        return self.is_fused and self.photometric_refinement == flags.AUTO

    @property
    def jobs(self) -> list[tuple[float, int]]:
        """Level and target of every mesh: levels in the outer, targets in the inner loop."""
        levels = (0.0,) if self.is_fused else self.surface_levels
        return [(level, target) for level in levels for target in self.decimation_targets]

    @property
    def mesh_paths(self) -> list[Path]:
        """Files of all meshes, in the order of ``jobs``."""
        return [self.mesh_path(*job) for job in self.jobs]

    def identity(self, level: float, target: int) -> dict[str, Any]:
        """Return the settings that decide one mesh, as its ``.json`` file keeps them."""
        skipped = {
            "preset",
            "scene_path",
            "checkpoint_path",
            "coarse_model_path",
            "mesh_output_dir",
            "compute",
            "mask_options",
            "view_options",
            "overwrite",
            "surface_levels",
            "decimation_targets",
            "poisson" if self.is_fused else "tsdf",
            *ABLATIONS,
        }
        decided = replace(self, poisson=self.poisson.resolved(has_hull=False))
        values = asdict(decided)
        for name in skipped:
            values.pop(name, None)
        del values["fill_holes"]
        del values["photometric_refinement"]
        if self.is_fused:
            values["photometric_refinement"] = self.refines_vertices
            values["fill_holes"] = self.fills_holes
            values["tsdf"]["tsdf_margin"] = self.tsdf.margin
        values["level"] = None if self.is_fused else level
        values["decimation_target"] = target
        alone = replace(self, decimation_targets=(target,))
        if not self.is_fused and alone.n_surface_points != self.n_surface_points:
            # With "auto" the largest of all targets decides.
            values["surface_points"] = self.n_surface_points
        return values

    @property
    def model(self) -> Path | None:
        """The coarse ``.pt``; None where the vanilla Gaussians are meshed."""
        if self.use_vanilla_3dgs or self.coarse_model_path is None:
            return None
        return model_file(self.coarse_model_path, COARSE_FLAG)

    def sources(self) -> dict[str, Any]:
        """Return the paths that the record of a mesh names."""
        sources = super().sources()
        if self.model is not None:
            sources["coarse_model"] = self.model.resolve()
        return sources


def variant_of(extractor: str) -> MeshVariant:
    """Return the part of file names that identifies an extractor."""
    variants: dict[str, MeshVariant] = {"tsdf": "tsdf", "tetrahedra": "tetrahedra"}
    return variants.get(extractor, "")


def mesh_name(model: str, level: float, target: int, variant: MeshVariant = "") -> str:
    """Return the file name of a mesh of the run ``sugarcoarse_<model>``, or ``vanilla3dgs``."""
    kind = {
        "": f"_level{number_text(level)}",
        "tsdf": "_tsdf",
        "tetrahedra": "_tetrahedra",
        "poissoncenters": "_poissoncenters",
        # Without an underscore, as in the original.
        "marchingcubes": f"marchingcubes_level{number_text(level)}",
    }[variant]
    return f"sugarmesh_{model}{kind}_decim{target}.ply"


def mesh_options(parsed: FlagValues) -> MeshOptions:
    """Return the options of parsed flags, with the mode that the model was trained in."""
    path = parsed["coarse_model_path"]
    if path is not None and not parsed["use_vanilla_3dgs"]:
        record = (path if path.is_dir() else path.parent) / RUN_FILE
        if record.is_file():
            settings = read_checked(record, RunRecord).get("settings", {})
            parsed = parsed.replaced(regularization_type=settings.get("regularization_type"))
    return from_args(MeshOptions, parsed)
