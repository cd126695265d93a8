# SPDX-License-Identifier: Apache-2.0
"""USD files: Gaussians as ``ParticleField3DGaussianSplat``, textured meshes as USDZ for phones."""

from __future__ import annotations

import tempfile
import zipfile
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from gaussian_splatting.cloud import GaussianCloud
from gaussian_splatting.formats.packing import (
    cloud_of,
    columns,
    logarithms,
    require_gaussians,
    sigmoid,
)
from sugar_extractors.export.usd_process import ANTIALIASED_KEY, WIDTHS
from sugar_extractors.texture.textured_mesh_io import TexturedMesh, png_bytes
from sugar_utils.errors import UserError
from sugar_utils.files import atomic_path, require_regular_file
from sugar_utils.libraries import load_package, run_alone

_MODULES = ("Gf", "Sdf", "Tf", "Usd", "UsdGeom", "UsdShade", "UsdUtils", "UsdVol", "Vt")
_REACH = 3  # extent of a Gaussian in standard deviations
_READ_ERRORS = (
    OSError,
    TypeError,
    UserError,
    ValueError,
    LookupError,
    EOFError,
    zipfile.BadZipFile,
)


def load_usd(what: str) -> ModuleType:
    """Return the package ``pxr``, whose modules are ``Usd``, ``UsdGeom`` and so on.

    Args:
        what: The flag or file that needs it, for the error.

    Raises:
        UserError: usd-core is not installed.
    """
    modules = [f"pxr.{name}" for name in _MODULES]
    return load_package(what, "usd-core", "pxr", *modules, instead="use another format")[0]


def write_usdz(path: Path, mesh: TexturedMesh) -> None:
    """Write a USDZ package with a mesh, y up and in metres, complete or not at all."""
    usd = load_usd("--to usdz")
    try:
        with tempfile.TemporaryDirectory() as folder, atomic_path(path) as temporary:
            texture = Path(folder) / "texture.png"
            texture.write_bytes(png_bytes(mesh.texture))
            scene = Path(folder) / "mesh.usdc"
            _write_scene(usd, scene, mesh)
            # The package goes by the suffix, and the temporary file has none.
            package = Path(folder) / "package.usdz"
            if not usd.UsdUtils.CreateNewUsdzPackage(str(scene), str(package)):
                raise UserError(f"{path}: usd-core could not make the package; use --to glb")
            temporary.write_bytes(package.read_bytes())
    except (OSError, usd.Tf.ErrorException) as error:
        # USD lists errors as "Error in 'function' at line N in file F : 'reason'".
        reason = str(error).split(" : ", 1)[-1].splitlines()[0].strip(" '")
        raise UserError(
            f"cannot write {path}: {reason}; free some space, also in {tempfile.gettempdir()}"
        ) from error


def write_usd_gaussians(path: Path, cloud: GaussianCloud) -> None:
    """Write a USD crate file with a ``ParticleField3DGaussianSplat``, complete or not at all."""
    require_gaussians(path, cloud)
    usd = load_usd("--to usd")
    stage = usd.Usd.Stage.CreateInMemory()
    usd.UsdGeom.SetStageUpAxis(stage, usd.UsdGeom.Tokens.y)
    usd.UsdGeom.SetStageMetersPerUnit(stage, 1.0)
    _define_field(usd, stage, cloud)
    with tempfile.TemporaryDirectory() as folder, atomic_path(path) as temporary:
        # USD goes by the suffix, and the temporary file has none.
        file = Path(folder) / "gaussians.usdc"
        if not stage.GetRootLayer().Export(str(file)):
            raise UserError(f"{path}: usd-core could not write it; free some space in {folder}")
        temporary.write_bytes(file.read_bytes())


def _define_field(usd: ModuleType, stage: Any, cloud: GaussianCloud) -> None:
    """Add the field of Gaussians to a stage, as its default prim."""
    field = usd.UsdVol.ParticleField3DGaussianSplat.Define(stage, "/Gaussians").GetPrim()
    stage.SetDefaultPrim(field)
    values = columns(cloud)
    scales = np.exp(values["log_scales"])
    harmonics = np.concatenate([values["sh_dc"], values["sh_rest"]], axis=1)
    arrays = {
        "positions": values["means"],
        "orientations": np.roll(values["quats"], -1, axis=1),
        "scales": scales,
        "opacities": sigmoid(values["opacity_logits"][:, 0]),
        "radiance:sphericalHarmonicsCoefficients": harmonics.reshape(-1, 3),
    }
    types = {1: usd.Vt.FloatArray, 3: usd.Vt.Vec3fArray, 4: usd.Vt.QuatfArray}
    for name, width in WIDTHS.items():
        array = arrays[name].astype(np.float32)
        field.GetAttribute(name).Set(types[width].FromNumpy(array))
    reach = _REACH * scales.max(axis=1, keepdims=True)
    low = (values["means"] - reach).min(axis=0)
    high = (values["means"] + reach).max(axis=0)
    extent = np.stack([low, high]).astype(np.float32)
    field.GetAttribute("extent").Set(usd.Vt.Vec3fArray.FromNumpy(extent))
    field.GetAttribute("sortingModeHint").Set("cameraDistance")
    if cloud.antialiased:
        field.SetCustomDataByKey(ANTIALIASED_KEY, True)


def read_usd_gaussians(path: Path) -> GaussianCloud:
    """Read the first field of Gaussians of a USD file; attributes are float or half.

    Raises:
        UserError: The file is damaged, or has no field of Gaussians.
    """
    load_usd(str(require_regular_file(path)))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "arrays.npz"
        try:
            run_alone("sugar_extractors.export.usd_process", [str(path.resolve()), str(file)])
            with np.load(file) as arrays:
                means, quats, scales, opacities, harmonics = (arrays[name] for name in WIDTHS)
                n_coefficients = (int(arrays["degree"]) + 1) ** 2
                antialiased = bool(arrays["antialiased"])
            harmonics = harmonics.reshape(len(means), n_coefficients, 3)[:, :16]
            quats = np.roll(quats.reshape(len(means), 4), 1, axis=1)
            log_scales = logarithms(scales.reshape(len(means), 3))
        except _READ_ERRORS as error:
            reason = " ".join(str(error).split())[:200]
            raise UserError(f"{path}: damaged, or no field of Gaussians ({reason})") from error
    sh_dc = harmonics[:, 0]
    sh_rest = harmonics[:, 1:]
    cloud = cloud_of(path, means, quats, log_scales, opacities, sh_dc, sh_rest)
    return replace(cloud, antialiased=antialiased)


def _write_scene(usd: ModuleType, path: Path, mesh: TexturedMesh) -> None:
    """Write a USD crate file with a mesh; its material refers to ``texture.png`` beside it."""
    stage = usd.Usd.Stage.CreateNew(str(path))
    usd.UsdGeom.SetStageUpAxis(stage, usd.UsdGeom.Tokens.y)
    usd.UsdGeom.SetStageMetersPerUnit(stage, 1.0)
    root = usd.UsdGeom.Xform.Define(stage, "/Scan")
    stage.SetDefaultPrim(root.GetPrim())
    shape = usd.UsdGeom.Mesh.Define(stage, "/Scan/Mesh")
    vertices = mesh.vertices.cpu().numpy().astype(np.float32)
    faces = mesh.faces.cpu().numpy().astype(np.int32)
    uvs = mesh.uvs.cpu().numpy().astype(np.float32).reshape(-1, 2)
    corner_counts = np.full(len(faces), 3, np.int32)
    extent = np.stack([vertices.min(axis=0), vertices.max(axis=0)])
    arrays = usd.Vt
    shape.CreatePointsAttr(arrays.Vec3fArray.FromNumpy(vertices))
    shape.CreateFaceVertexCountsAttr(arrays.IntArray.FromNumpy(corner_counts))
    shape.CreateFaceVertexIndicesAttr(arrays.IntArray.FromNumpy(faces.ravel()))
    shape.CreateExtentAttr(arrays.Vec3fArray.FromNumpy(extent))
    shape.CreateSubdivisionSchemeAttr(usd.UsdGeom.Tokens.none)
    shape.CreateDoubleSidedAttr(True)
    coordinates = usd.UsdGeom.PrimvarsAPI(shape).CreatePrimvar(
        "st", usd.Sdf.ValueTypeNames.TexCoord2fArray, usd.UsdGeom.Tokens.faceVarying
    )
    coordinates.Set(arrays.Vec2fArray.FromNumpy(uvs))
    usd.UsdShade.MaterialBindingAPI.Apply(shape.GetPrim()).Bind(_material(usd, stage))
    stage.GetRootLayer().Save()


def _material(usd: ModuleType, stage: Any) -> Any:
    """Add a material that emits the colours of the texture, so that no light changes them."""
    types = usd.Sdf.ValueTypeNames
    material = usd.UsdShade.Material.Define(stage, "/Scan/Material")

    def add_shader(name: str, kind: str, **inputs: tuple[Any, Any]) -> Any:
        """Add a shader; each input is a type and a value."""
        shader = usd.UsdShade.Shader.Define(stage, f"/Scan/Material/{name}")
        shader.CreateIdAttr(kind)
        for key, (type_, value) in inputs.items():
            shader.CreateInput(key, type_).Set(value)
        return shader

    reader = add_shader("Places", "UsdPrimvarReader_float2", varname=(types.String, "st"))
    picture = add_shader(
        "Picture",
        "UsdUVTexture",
        file=(types.Asset, "texture.png"),
        sourceColorSpace=(types.Token, "sRGB"),
        wrapS=(types.Token, "clamp"),
        wrapT=(types.Token, "clamp"),
    )
    coordinates = reader.CreateOutput("result", types.Float2)
    picture.CreateInput("st", types.Float2).ConnectToSource(coordinates)
    surface = add_shader(
        "Surface",
        "UsdPreviewSurface",
        diffuseColor=(types.Color3f, usd.Gf.Vec3f(0.0)),
        roughness=(types.Float, 1.0),
    )
    colors = picture.CreateOutput("rgb", types.Float3)
    surface.CreateInput("emissiveColor", types.Color3f).ConnectToSource(colors)
    material.CreateSurfaceOutput().ConnectToSource(surface.CreateOutput("surface", types.Token))
    return material
