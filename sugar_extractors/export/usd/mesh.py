# SPDX-License-Identifier: Apache-2.0
"""Textured meshes as USD, and as USDZ for phones."""

from __future__ import annotations

import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from sugar_extractors.export.usd.library import load_usd, new_stage, write_error, write_package
from sugar_extractors.texture.textured_mesh_io import TexturedMesh, png_bytes

ROOT = "/Scan"
"""Path of the root prim, the default prim of a stage with a mesh."""

MESH = f"{ROOT}/Mesh"
"""Path of the prim of the mesh."""

_MATERIAL = f"{ROOT}/Material"
_TEXTURE = "texture.png"


def write_usdz(path: Path, mesh: TexturedMesh) -> None:
    """Write a USDZ package with a mesh, y up and in metres, complete or not at all."""
    usd = load_usd("--to usdz")
    try:
        with tempfile.TemporaryDirectory() as folder:
            layer = Path(folder) / "mesh.usdc"
            stage = new_stage(usd, layer)
            define_mesh(usd, stage, mesh, Path(folder))
            stage.GetRootLayer().Save()
            write_package(usd, path, layer)
    except (OSError, usd.Tf.ErrorException) as error:
        raise write_error(usd, path, error) from error


def define_mesh(usd: ModuleType, stage: Any, mesh: TexturedMesh, folder: Path) -> Any:
    """Add the root prim and a mesh with its material to a stage; return the mesh.

    Args:
        usd: The package, by :func:`load_usd`.
        stage: The stage.
        mesh: The mesh, y up.
        folder: Folder of the stage's layer, where the picture is written.
    """
    (folder / _TEXTURE).write_bytes(png_bytes(mesh.texture))
    root = usd.UsdGeom.Xform.Define(stage, ROOT)
    stage.SetDefaultPrim(root.GetPrim())
    shape = usd.UsdGeom.Mesh.Define(stage, MESH)
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
    return shape


def _material(usd: ModuleType, stage: Any) -> Any:
    """Add a material that emits the colours of the texture, so that no light changes them."""
    types = usd.Sdf.ValueTypeNames
    material = usd.UsdShade.Material.Define(stage, _MATERIAL)

    def add_shader(name: str, kind: str, **inputs: tuple[Any, Any]) -> Any:
        """Add a shader; each input is a type and a value."""
        shader = usd.UsdShade.Shader.Define(stage, f"{_MATERIAL}/{name}")
        shader.CreateIdAttr(kind)
        for key, (type_, value) in inputs.items():
            shader.CreateInput(key, type_).Set(value)
        return shader

    reader = add_shader("Places", "UsdPrimvarReader_float2", varname=(types.String, "st"))
    picture = add_shader(
        "Picture",
        "UsdUVTexture",
        file=(types.Asset, _TEXTURE),
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
