# SPDX-License-Identifier: Apache-2.0
"""Textured meshes as USD, and as USDZ for phones."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from sugar_extractors.export.usd.collision import define_collider
from sugar_extractors.export.usd.geometry import set_triangles
from sugar_extractors.export.usd.library import load_usd, new_package
from sugar_extractors.export_contents import Collider
from sugar_scene.mesh_files.textured_mesh_io import TexturedMesh, png_bytes

ROOT = "/Scan"
"""Path of the root prim, the default prim of a stage with a mesh."""

MESH = f"{ROOT}/Mesh"
"""Path of the prim of the mesh."""

_MATERIAL = f"{ROOT}/Material"
_TEXTURE = "texture.png"


def write_usdz(path: Path, mesh: TexturedMesh, collider: Collider | None = None) -> None:
    """Write a USDZ package with a mesh, y up and in metres, complete or not at all.

    Args:
        path: The file.
        mesh: The mesh.
        collider: What it collides with; None: nothing.
    """
    usd = load_usd("--to usdz")
    with new_package(usd, path, path, "mesh.usdc") as (stage, folder):
        define_mesh(usd, stage, mesh, folder)
        if collider is not None:
            define_collider(usd, stage, ROOT, collider)


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
    set_triangles(usd, shape, mesh.vertices.cpu().numpy(), mesh.faces.cpu().numpy())
    uvs = mesh.uvs.cpu().numpy().astype(np.float32).reshape(-1, 2)
    shape.CreateDoubleSidedAttr(True)
    coordinates = usd.UsdGeom.PrimvarsAPI(shape).CreatePrimvar(
        "st", usd.Sdf.ValueTypeNames.TexCoord2fArray, usd.UsdGeom.Tokens.faceVarying
    )
    coordinates.Set(usd.Vt.Vec2fArray.FromNumpy(uvs))
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
