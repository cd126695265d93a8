# SPDX-License-Identifier: Apache-2.0
"""For other machines: STL and 3MF of meshes for printers, USDZ for phones; Gaussians as USD."""

from __future__ import annotations

import tempfile
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import normalize

from gaussian_splatting.cloud import GaussianCloud
from gaussian_splatting.formats.packing import (
    cloud_of,
    columns,
    logarithms,
    require_gaussians,
    sigmoid,
)
from sugar_extractors.export.usd_process import ANTIALIASED_KEY, WIDTHS
from sugar_extractors.mesh.meshing_backends import choose_backend
from sugar_extractors.mesh_quality import Surface
from sugar_extractors.texture import texture_atlas
from sugar_extractors.texture.tangent_space import FLAT, encoded, tangent_frames, vertex_normals
from sugar_extractors.texture.texture_atlas import Atlas
from sugar_extractors.texture.texture_baking import with_filled_gaps
from sugar_extractors.texture.textured_mesh_io import TexturedMesh, png_bytes, sample_texture
from sugar_scene import triangle_mesh
from sugar_scene.triangle_mesh import TriangleMesh
from sugar_utils.errors import UserError
from sugar_utils.files import atomic_path, require_regular_file
from sugar_utils.libraries import load_package, run_alone

MILLIMETRES = 1000.0
Z_UP = np.array([[1.0, 0, 0, 0], [0, 0, -1, 0], [0, 1, 0, 0], [0, 0, 0, 1]])  # from y up to z up
_MAX_ROUNDS = 8

_CHUNK_TEXELS = 1 << 20
_GREY = 128


def closed_body(mesh: TriangleMesh) -> TriangleMesh:
    """The largest connected part of a mesh with all its holes covered.

    Where that brings three faces together at an edge, the clean-up takes one away; the hole is
    covered again, a few times at most.
    """
    labels = triangle_mesh.component_labels(mesh)
    faces_of = np.bincount(labels[mesh.faces[:, 0]])
    body = triangle_mesh.clean_mesh(triangle_mesh.keep_vertices(mesh, labels == faces_of.argmax()))
    for _ in range(_MAX_ROUNDS):
        if triangle_mesh.open_edge_share(body) == 0:
            break
        body = triangle_mesh.clean_mesh(triangle_mesh.with_holes_filled(body))
    return body


def write_printable(path: Path, mesh: TriangleMesh, kind: str) -> None:
    """Write a binary STL or a 3MF package, in millimetres, complete or not at all."""
    # Here and not above: pipelines start half a second sooner without it.
    import trimesh

    body = trimesh.Trimesh(mesh.vertices, mesh.faces, process=False, validate=False)
    with atomic_path(path) as temporary:
        # The package holds bodies in a scene.
        content = body if kind == "stl" else trimesh.Scene(body)
        temporary.write_bytes(content.export(file_type=kind))


def load_usd(what: str) -> Any:
    """The package, whose modules are ``Usd``, ``UsdGeom`` and so on."""
    names = ("Gf", "Sdf", "Tf", "Usd", "UsdGeom", "UsdShade", "UsdUtils", "UsdVol", "Vt")
    modules = ("pxr", *(f"pxr.{name}" for name in names))
    return load_package(what, "usd-core", *modules, instead="use another format")[0]


def write_usdz(path: Path, mesh: TexturedMesh) -> None:
    usd = load_usd("--to usdz")
    try:
        with tempfile.TemporaryDirectory() as folder, atomic_path(path) as temporary:
            (Path(folder) / "texture.png").write_bytes(png_bytes(mesh.texture))
            scene = Path(folder) / "mesh.usdc"
            _write_scene(usd, scene, mesh)
            # The package decides by the suffix what it is, and the temporary file has none.
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
    values = columns(cloud)
    stage = usd.Usd.Stage.CreateInMemory()
    scales = np.exp(values["log_scales"])
    usd.UsdGeom.SetStageUpAxis(stage, usd.UsdGeom.Tokens.y)
    usd.UsdGeom.SetStageMetersPerUnit(stage, 1.0)
    field = usd.UsdVol.ParticleField3DGaussianSplat.Define(stage, "/Gaussians").GetPrim()
    stage.SetDefaultPrim(field)
    harmonics = np.concatenate([values["sh_dc"], values["sh_rest"]], axis=1).reshape(-1, 3)
    quats = np.roll(values["quats"], -1, axis=1)
    opacities = values["opacity_logits"][:, 0]
    kinds = {1: usd.Vt.FloatArray, 3: usd.Vt.Vec3fArray, 4: usd.Vt.QuatfArray}
    arrays = values["means"], quats, scales, sigmoid(opacities), harmonics
    for (name, width), array in zip(WIDTHS.items(), arrays, strict=True):
        field.GetAttribute(name).Set(kinds[width].FromNumpy(array.astype(np.float32)))
    reach = 3 * scales.max(axis=1, keepdims=True)
    ends = (values["means"] - reach).min(axis=0), (values["means"] + reach).max(axis=0)
    field.GetAttribute("extent").Set(kinds[3].FromNumpy(np.stack(ends).astype(np.float32)))
    field.GetAttribute("sortingModeHint").Set("cameraDistance")
    if cloud.antialiased:
        field.SetCustomDataByKey(ANTIALIASED_KEY, True)
    with tempfile.TemporaryDirectory() as folder, atomic_path(path) as temporary:
        # The suffix decides what kind of file it is, and the temporary file has none.
        file = Path(folder) / "gaussians.usdc"
        if not stage.GetRootLayer().Export(str(file)):
            raise UserError(f"{path}: usd-core could not write it; free some space in {folder}")
        temporary.write_bytes(file.read_bytes())


def read_usd_gaussians(path: Path) -> GaussianCloud:
    """Read the first field of Gaussians of a USD file; attributes are float or half."""
    load_usd(str(require_regular_file(path)))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "arrays.npz"
        try:
            run_alone("sugar_extractors.export.usd_process", [str(path.resolve()), str(file)])
            with np.load(file) as found:
                means, quats, scales, opacities, harmonics = (found[name] for name in WIDTHS)
                bands = (int(found["degree"]) + 1) ** 2
                antialiased = bool(found["antialiased"])
            harmonics = harmonics.reshape(len(means), bands, 3)[:, :16]
            quats = np.roll(quats.reshape(len(means), 4), 1, axis=1)
            logs = logarithms(scales.reshape(len(means), 3))
        except (
            *(OSError, TypeError, UserError, ValueError, LookupError, EOFError),
            zipfile.BadZipFile,
        ) as error:
            reason = " ".join(str(error).split())[:200]
            raise UserError(f"{path}: damaged, or no field of Gaussians ({reason})") from error
    dc = harmonics[:, 0]
    rest = harmonics[:, 1:]
    cloud = cloud_of(path, means, quats, logs, opacities, dc, rest)
    return replace(cloud, antialiased=antialiased)


def _write_scene(usd: Any, path: Path, mesh: TexturedMesh) -> None:
    stage = usd.Usd.Stage.CreateNew(str(path))
    usd.UsdGeom.SetStageUpAxis(stage, usd.UsdGeom.Tokens.y)
    usd.UsdGeom.SetStageMetersPerUnit(stage, 1.0)
    root = usd.UsdGeom.Xform.Define(stage, "/Scan")
    stage.SetDefaultPrim(root.GetPrim())
    shape = usd.UsdGeom.Mesh.Define(stage, "/Scan/Mesh")
    vertices = mesh.vertices.cpu().numpy().astype(np.float32)
    faces = mesh.faces.cpu().numpy().astype(np.int32)
    uvs = mesh.uvs.cpu().numpy().astype(np.float32).reshape(-1, 2)
    arrays = usd.Vt
    ends = np.stack([vertices.min(axis=0), vertices.max(axis=0)])
    shape.CreatePointsAttr(arrays.Vec3fArray.FromNumpy(vertices))
    shape.CreateFaceVertexCountsAttr(arrays.IntArray.FromNumpy(np.full(len(faces), 3, np.int32)))
    shape.CreateFaceVertexIndicesAttr(arrays.IntArray.FromNumpy(faces.ravel()))
    shape.CreateExtentAttr(arrays.Vec3fArray.FromNumpy(ends))
    shape.CreateSubdivisionSchemeAttr(usd.UsdGeom.Tokens.none)
    shape.CreateDoubleSidedAttr(True)
    kind = usd.Sdf.ValueTypeNames.TexCoord2fArray, usd.UsdGeom.Tokens.faceVarying
    corners = usd.UsdGeom.PrimvarsAPI(shape).CreatePrimvar("st", *kind)
    corners.Set(arrays.Vec2fArray.FromNumpy(uvs))
    usd.UsdShade.MaterialBindingAPI.Apply(shape.GetPrim()).Bind(_material(usd, stage))
    stage.GetRootLayer().Save()


def _material(usd: Any, stage: Any) -> Any:
    types = usd.Sdf.ValueTypeNames
    shade = usd.UsdShade
    material = shade.Material.Define(stage, "/Scan/Material")

    def shader(name: str, kind: str, **inputs: tuple[Any, Any]) -> Any:
        made = shade.Shader.Define(stage, f"/Scan/Material/{name}")
        made.CreateIdAttr(kind)
        for key, (type_, value) in inputs.items():
            made.CreateInput(key, type_).Set(value)
        return made

    places = shader("Places", "UsdPrimvarReader_float2", varname=(types.String, "st"))
    clamp = (types.Token, "clamp")
    picture = shader(
        "Picture",
        "UsdUVTexture",
        file=(types.Asset, "texture.png"),
        sourceColorSpace=(types.Token, "sRGB"),
        wrapS=clamp,
        wrapT=clamp,
    )
    found = places.CreateOutput("result", types.Float2)
    picture.CreateInput("st", types.Float2).ConnectToSource(found)
    black = (types.Color3f, usd.Gf.Vec3f(0.0))
    rough = (types.Float, 1.0)
    surface = shader("Surface", "UsdPreviewSurface", diffuseColor=black, roughness=rough)
    shown = picture.CreateOutput("rgb", types.Float3)
    surface.CreateInput("emissiveColor", types.Color3f).ConnectToSource(shown)
    material.CreateSurfaceOutput().ConnectToSource(surface.CreateOutput("surface", types.Token))
    return material


def simplified(
    mesh: TexturedMesh, n_faces: int | None, texture_side: int | None, normal_map: bool = False
) -> TexturedMesh:
    """The mesh with at most so many triangles and texels a side; None for as many as now.

    ``normal_map`` keeps the normals of the mesh as it was.
    """
    reduced = shape_of(mesh)
    if n_faces is not None and n_faces < mesh.n_faces:
        reduced = triangle_mesh.clean_mesh(choose_backend().decimate(reduced, n_faces))
    if reduced.n_faces == 0:
        raise UserError(f"no triangles are left at --max_triangles {n_faces}; raise it")
    side = min(mesh.texture.shape[1], texture_side or mesh.texture.shape[1])
    square = texture_atlas.largest_square_size(reduced.n_faces, side)
    vertices = torch.from_numpy(reduced.vertices.astype(np.float32))
    faces = torch.from_numpy(reduced.faces)
    atlas = texture_atlas.make_atlas("charts", vertices, faces, square)
    target = TexturedMesh(vertices, faces, atlas.uvs.cpu(), mesh.texture)
    return transferred(mesh, target, atlas, normal_map)


def shape_of(mesh: TexturedMesh) -> TriangleMesh:
    """Its triangles, grey."""
    vertices = mesh.vertices.double().cpu().numpy()
    colors = np.full((len(vertices), 3), _GREY, np.uint8)
    return TriangleMesh(vertices, mesh.faces.cpu().numpy(), colors)


def transferred(
    mesh: TexturedMesh, target: TexturedMesh, atlas: Atlas, normal_map: bool
) -> TexturedMesh:
    """A mesh of nearly the shape of another one with its picture."""
    corners = target.vertices.double().numpy()
    low = corners.min(axis=0)
    size = max(np.ptp(corners, axis=0).max(), 1e-12)
    source = shape_of(mesh)
    places = (source.vertices - low) / size
    surface = Surface(places, source.faces)
    corners = ((corners - low) / size)[target.faces.numpy()]
    uvs = mesh.uvs.cpu()
    texture = mesh.texture.cpu()
    fine_faces = mesh.faces.cpu()
    fine_normals = vertex_normals(mesh.vertices.float().cpu(), fine_faces)
    picture = torch.full((atlas.side, atlas.side, 3), _GREY, dtype=torch.uint8, device="cpu")
    normals = torch.tensor(FLAT, dtype=torch.uint8, device="cpu").repeat(atlas.side, atlas.side, 1)
    axes = target.corner_axes() if normal_map else None
    step = max(1, _CHUNK_TEXELS // atlas.side)
    for first in range(0, atlas.side, step):
        end = min(first + step, atlas.side)
        owners = atlas.texel_faces(first, end).cpu().numpy()
        y, x = np.nonzero(owners >= 0)
        rows = owners[y, x]
        at_texels = (torch.from_numpy(y), torch.from_numpy(x))
        texels = np.stack([x + 0.5, y + first + 0.5], axis=1)
        own = _weights(texels, atlas.corners.cpu().double().numpy()[rows])
        points = (own[..., None] * corners[rows]).sum(axis=1)
        faces = surface.nearest(points).faces
        weights = torch.from_numpy(_weights(points, places[source.faces[faces]])).float()
        found = torch.from_numpy(faces)
        at = (weights[..., None] * uvs[found]).sum(dim=1)
        picture[first:end][at_texels] = (sample_texture(texture, at) * 255).round().to(torch.uint8)
        if normal_map:
            fine = (weights[..., None] * fine_normals[fine_faces[found]]).sum(dim=1)
            at_rows = (values[torch.from_numpy(rows).long()] for values in axes)
            frames = tangent_frames(*at_rows, torch.from_numpy(own).float())
            normals[first:end][at_texels] = encoded(normalize(fine, dim=1), frames)
    # Rows of texels run with v, those of the picture against it.
    kept = normals.flip(0) if normal_map else None
    return replace(target, texture=with_filled_gaps(picture.flip(0), atlas), normal_map=kept)


def _weights(points: np.ndarray, triangles: np.ndarray) -> np.ndarray:
    """Barycentric coordinates of places in triangles near points. (Q, 3)"""
    a, b, c = triangles.transpose(1, 0, 2)
    u = b - a
    v = c - a
    w = points - a
    uu, uv, vv = ((p * q).sum(axis=1) for p, q in ((u, u), (u, v), (v, v)))
    wu = (w * u).sum(axis=1)
    wv = (w * v).sum(axis=1)
    area = uu * vv - uv * uv
    flat = area <= 1e-14 * np.maximum(uu * vv, 1e-300)
    area = np.where(flat, 1.0, area)
    second = np.where(flat, 0.0, (vv * wu - uv * wv) / area)
    third = np.where(flat, 0.0, (uu * wv - uv * wu) / area)
    clipped = np.maximum(np.stack([1 - second - third, second, third], axis=1), 0)
    return clipped / clipped.sum(axis=1, keepdims=True)
