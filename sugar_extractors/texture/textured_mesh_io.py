# SPDX-License-Identifier: Apache-2.0
"""Textured meshes as OBJ with MTL and PNG, as one GLB file, and rendered without lighting.

The OBJ is laid out as SuGaR's tools exchange it: positions, three texture coordinates per face,
then faces, without normals. Face i uses the texture coordinates 3 i + 1 to 3 i + 3.

Normal maps hold normals of a fine mesh in the tangent space of a coarse one, as glTF has it. At
each corner stand the vertex normal N, the tangent T along u, and the bitangent w N x T along v,
which points upwards in the picture; in between they are interpolated. T is that of MikkTSpace: as
no two faces share texture coordinates, the direction of u in the face, made perpendicular to N.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import normalize

from gaussian_splatting.data.cameras import Camera
from gaussian_splatting.data.images import IMAGE_ERRORS
from gaussian_splatting.formats.moved import GLB_AXES
from sugar_extractors.texture import materials
from sugar_extractors.texture.materials import Material
from sugar_scene.triangle_rasterizer import rasterize_triangles
from sugar_utils.errors import UserError
from sugar_utils.files import atomic_path, require_regular_file

_CHUNK_ROWS = 1 << 16
_GLB_LIMIT = (1 << 32) - 1
_JPEG = b"\xff\xd8\xff"
_LARGE_PNG, _JPEG_QUALITY = 8 << 20, 95
_FLOAT32, _ARRAY_BUFFER, _TRIANGLES, _LINEAR, _CLAMP = 5126, 34962, 4, 9729, 33071


@dataclass(frozen=True)
class TexturedMesh:
    """A mesh with a picture on it; all tensors on one device."""

    vertices: Tensor  # (V, 3) float32 world units
    faces: Tensor  # rows of the vertices, (F, 3) int64
    uvs: Tensor  # texture coordinates of the corners, v upwards, (F, 3, 2) float32 in [0, 1]
    texture: Tensor  # row 0 is at v = 1, (H, W, 3) uint8
    normal_map: Tensor | None = None  # tangent-space normals, (H, W, 3) uint8

    @property
    def n_faces(self) -> int:
        return self.faces.shape[0]

    def to(self, device: torch.device | str) -> TexturedMesh:
        return TexturedMesh(*(t if t is None else t.to(device) for t in vars(self).values()))

    def corner_axes(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Vertex normals and tangents at the corners of some faces. (R, 3, 3), (R, 3, 4)"""
        vertices, faces = self.vertices.float(), self.faces[rows]
        normals = vertex_normals(vertices, self.faces)
        return normals[faces], corner_tangents(vertices, faces, self.uvs[rows], normals)


def mesh_files(obj_path: Path, glb: bool, normal_map: bool = False) -> list[Path]:
    """The files of a textured mesh, in the order in which they appear."""
    suffixes = [".png", ".mtl", *([".glb"] if glb else []), ".obj"]
    normals = [obj_path.with_name(f"{obj_path.stem}_normals.png")] if normal_map else []
    return [*normals, *(obj_path.with_suffix(suffix) for suffix in suffixes)]


def write_textured_mesh(
    obj_path: Path, mesh: TexturedMesh, *, glb: bool = True, y_up: bool = False
) -> list[Path]:
    """Write OBJ, MTL, PNG and, if wanted, GLB; the OBJ last, so that its picture is there."""
    paths = mesh_files(obj_path, glb)
    with ExitStack() as stack:
        # The last one to be entered takes its final name first.
        targets = {path: stack.enter_context(atomic_path(path)) for path in reversed(paths)}
        write_mesh_files(targets, mesh, y_up)
    return paths


def write_mesh_files(targets: Mapping[Path, Path], mesh: TexturedMesh, y_up: bool = False) -> None:
    """Write the files of a textured mesh under other names than they will have."""
    # Of two pictures the texture is the last.
    names = {path.suffix: path for path in sorted(targets, key=lambda path: -len(path.name))}
    png = png_bytes(mesh.texture)
    targets[names[".png"]].write_bytes(png)
    material = f"newmtl mesh\nmap_Kd {names['.png'].name}"
    if mesh.normal_map is not None:
        picture = mesh_files(names[".obj"], glb=False, normal_map=True)[0]
        targets[picture].write_bytes(png_bytes(mesh.normal_map))
        # Programs know one word or the other.
        material += f"\nmap_Bump {picture.name}\nnorm {picture.name}"
    targets[names[".mtl"]].write_bytes(material.encode())
    with targets[names[".obj"]].open("wb") as file:
        file.writelines(obj_chunks(mesh, names[".mtl"].name))
    if ".glb" in names:
        write_glb(targets[names[".glb"]], mesh, names[".glb"], y_up, png)


def write_glb(
    target: Path, mesh: TexturedMesh, path: Path, y_up: bool, png: bytes | None = None
) -> None:
    """Write the one-file form; ``path`` is what errors call it."""
    png = png or png_bytes(mesh.texture)
    # Web pages load it: JPEG where PNG is large.
    small = png if len(png) <= _LARGE_PNG else jpeg_bytes(mesh.texture, _JPEG_QUALITY)
    with target.open("wb") as file:
        file.writelines(glb_chunks(mesh, small, path, y_up))


def png_bytes(texture: Tensor) -> bytes:
    """A picture as PNG. (H, W, 3) uint8"""
    buffer = BytesIO()
    pixels = np.ascontiguousarray(texture.cpu().numpy())
    Image.fromarray(pixels).save(buffer, format="PNG", compress_level=4)
    return buffer.getvalue()


def jpeg_bytes(texture: Tensor, quality: int = 85) -> bytes:
    """A picture as JPEG; above a quality of 90, colours are at full resolution. (H, W, 3) uint8"""
    buffer, chroma = BytesIO(), 0 if quality > 90 else 2
    picture = Image.fromarray(np.ascontiguousarray(texture.cpu().numpy()))
    picture.save(buffer, format="JPEG", quality=quality, subsampling=chroma)
    return buffer.getvalue()


def obj_chunks(mesh: TexturedMesh, material_name: str) -> Iterator[bytes]:
    yield f"\nmtllib {material_name}\nusemtl mesh\n\n".encode()
    # Nine digits give every float32 back as it was.
    yield from _lines("v %.9g %.9g %.9g\n", mesh.vertices.cpu().numpy())
    yield from _lines("vt %.9g %.9g\n", mesh.uvs.reshape(-1, 2).cpu().numpy())
    faces, columns, line = mesh.faces.cpu().numpy(), [0, 1], "f %d/%d %d/%d %d/%d\n"
    if mesh.normal_map is not None:
        normals = vertex_normals(mesh.vertices.float(), mesh.faces)
        yield from _lines("vn %.6g %.6g %.6g\n", normals.cpu().numpy())
        columns, line = [0, 1, 0], "f %d/%d/%d %d/%d/%d %d/%d/%d\n"
    for first in range(0, len(faces), _CHUNK_ROWS):
        chunk = faces[first : first + _CHUNK_ROWS]
        corners = np.arange(3 * first, 3 * (first + len(chunk))).reshape(-1, 3)
        table = np.stack([(chunk, corners)[k] for k in columns], axis=2).reshape(len(chunk), -1) + 1
        text = line * len(table) % tuple(table.ravel().tolist())
        yield (text if first + len(chunk) < len(faces) else text[:-1]).encode()


def _lines(pattern: str, rows: np.ndarray) -> Iterator[bytes]:
    for first in range(0, len(rows), _CHUNK_ROWS):
        chunk = rows[first : first + _CHUNK_ROWS]
        yield (pattern * len(chunk) % tuple(chunk.ravel().tolist())).encode()


def glb_chunks(
    mesh: TexturedMesh, picture: bytes, path: Path, y_up: bool = False, *, variants: bool = False
) -> Iterator[bytes]:
    """A binary glTF 2.0 file in parts: one mesh, its picture inside, no lighting.

    glTF wants y up and z towards the viewer, a capture in COLMAP's axes has y down and z forward.
    Corners are not shared, because every face has its own place in the picture.
    ``KHR_materials_unlit`` shows the colours of the photographs; normals need light.
    """
    if not y_up:
        turn = mesh.vertices.new_tensor(np.diag(GLB_AXES)[:3])
        mesh = replace(mesh, vertices=mesh.vertices.float() * turn)
    n_corners, normals = 3 * mesh.n_faces, b""
    sizes = [12 * n_corners, 8 * n_corners, len(picture)]
    if mesh.normal_map is not None:
        # Numbers begin at multiples of four bytes.
        n_picture, picture = len(picture), picture + b"\0" * (-len(picture) % 4)
        normals = png_bytes(mesh.normal_map)
        sizes = [*sizes[:2], len(picture), 12 * n_corners, 16 * n_corners, len(normals)]
    content = _gltf(mesh, sizes, picture)
    if normals:
        _add_normal_map(content)
        content["bufferViews"][2]["byteLength"] = n_picture
    if variants:
        _add_clay(content)
    yield glb_head(content, path, "use --export_glb False")
    vertices = mesh.vertices.float().cpu()
    for faces in mesh.faces.cpu().split(_CHUNK_ROWS):
        yield vertices[faces].numpy().astype("<f4").tobytes()
    for uvs in mesh.uvs.cpu().split(_CHUNK_ROWS):
        # The picture's first row is v = 0 here.
        yield (uvs.numpy() * (1, -1) + (0, 1)).astype("<f4").tobytes()
    yield picture
    if normals:
        axes = mesh.corner_axes(torch.arange(mesh.n_faces, device=mesh.faces.device))
        for values in axes:
            yield values.cpu().numpy().astype("<f4").tobytes()
        yield normals
    yield b"\0" * (-sum(sizes) % 4)


def glb_head(content: dict[str, Any], path: Path, instead: str) -> bytes:
    """What stands before the binary part of a GLB: two heads, and its description as JSON."""
    text = json.dumps(content, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 4)
    n_binary = content["buffers"][0]["byteLength"]
    total = 12 + 8 + len(text) + 8 + n_binary
    if total > _GLB_LIMIT:
        raise UserError(f"{path}: larger than the 4 GiB of a GLB file; {instead}")
    head = struct.pack("<4sII", b"glTF", 2, total) + struct.pack("<I4s", len(text), b"JSON")
    return head + text + struct.pack("<I4s", n_binary, b"BIN\0")


def gltf_start(extension: str, primitive: dict[str, Any]) -> dict[str, Any]:
    """What a glTF of one mesh begins with."""
    return {
        "asset": {"version": "2.0", "generator": "sugar-trainer"}, "extensionsUsed": [extension],
        "scene": 0, "scenes": [{"nodes": [0]}], "nodes": [{"mesh": 0}],
        "meshes": [{"primitives": [primitive]}],
    }  # fmt: skip


def _gltf(mesh: TexturedMesh, sizes: list[int], picture: bytes) -> dict[str, Any]:
    """The JSON part of a GLB: positions, texture coordinates and picture, in this order."""
    views = [
        {"buffer": 0, "byteOffset": sum(sizes[:k]), "byteLength": size}
        for k, size in enumerate(sizes)
    ]
    for view in views[:2]:
        view["target"] = _ARRAY_BUFFER
    corners = mesh.vertices[mesh.faces.unique()].float()
    accessor = {"componentType": _FLOAT32, "count": 3 * mesh.n_faces}
    bounds = {"min": corners.amin(dim=0).tolist(), "max": corners.amax(dim=0).tolist()}
    primitive = {
        "attributes": {"POSITION": 0, "TEXCOORD_0": 1}, "material": 0, "mode": _TRIANGLES
    }  # fmt: skip
    metal = {"baseColorTexture": {"index": 0}, "metallicFactor": 0.0, "roughnessFactor": 1.0}
    material = {
        "name": "mesh", "doubleSided": True, "pbrMetallicRoughness": metal,
        "extensions": {"KHR_materials_unlit": {}},
    }  # fmt: skip
    kind = "jpeg" if picture.startswith(_JPEG) else "png"
    return {
        **gltf_start("KHR_materials_unlit", primitive), "materials": [material],
        "textures": [{"sampler": 0, "source": 0}],
        # Smaller copies of the picture would mix the colours of unrelated faces.
        "samplers": [dict(magFilter=_LINEAR, minFilter=_LINEAR, wrapS=_CLAMP, wrapT=_CLAMP)],
        "images": [{"bufferView": 2, "mimeType": f"image/{kind}"}],
        "accessors": [
            {"bufferView": 0, "type": "VEC3", **accessor, **bounds},
            {"bufferView": 1, "type": "VEC2", **accessor},
        ],
        "bufferViews": views, "buffers": [{"byteLength": -(-sum(sizes) // 4) * 4}],
    }  # fmt: skip


def _add_normal_map(content: dict[str, Any]) -> None:
    """Normals, tangents and their picture: the last three parts of the file; lit by the viewer."""
    count = content["accessors"][0]["count"]
    kinds = ("NORMAL", "VEC3"), ("TANGENT", "VEC4")
    for view, (name, kind) in enumerate(kinds, start=3):
        content["meshes"][0]["primitives"][0]["attributes"][name] = len(content["accessors"])
        content["bufferViews"][view]["target"] = _ARRAY_BUFFER
        accessor = {"bufferView": view, "type": kind, "componentType": _FLOAT32, "count": count}
        content["accessors"].append(accessor)
    content["images"].append({"bufferView": 5, "mimeType": "image/png"})
    content["textures"].append({"sampler": 0, "source": 1})
    content["materials"][0]["normalTexture"] = {"index": 1}
    del content["extensionsUsed"], content["materials"][0]["extensions"]


def _add_clay(content: dict[str, Any]) -> None:
    """A second material, lit by the viewer, and names for both."""
    color, variants = [0.6, 0.6, 0.58, 1.0], "KHR_materials_variants"
    metal = {"baseColorFactor": color, "metallicFactor": 0.0, "roughnessFactor": 0.9}
    clay = {"name": "clay", "doubleSided": True, "pbrMetallicRoughness": metal}
    content["materials"].append(clay)
    content["extensionsUsed"].append(variants)
    content["extensions"] = {variants: {"variants": [{"name": "textured"}, {"name": "clay"}]}}
    mappings = [{"material": k, "variants": [k]} for k in range(2)]
    (primitive,) = content["meshes"][0]["primitives"]
    primitive["extensions"] = {variants: {"mappings": mappings}}


def read_textured_mesh(path: Path) -> TexturedMesh:
    """Read an OBJ of triangles with texture coordinates, and the picture of its material file.

    The pictures of several materials are put together into one.
    """
    path = Path(path)
    try:
        lines = require_regular_file(path, missing_ok=True).read_bytes().split(b"\n")
        vertices = _table(lines, b"v ", 3, np.float64)
        points = _table(lines, b"vt ", 2, np.float64)
        first = next((line for line in lines if line.startswith(b"f ")), b"")
        width = max(2, 1 + first.split()[1].count(b"/")) if len(first.split()) > 1 else 2
        rows = _table(lines, b"f ", 3 * width, np.int64).reshape(-1, 3, width)[..., :2] - 1
        material = _value(lines, b"mtllib ", path)
        material_path = materials.material_path(path.parent, material)
        by_name = materials.materials_of(material_path.read_bytes().split(b"\n"))
        names, of_faces = materials.materials_of_faces(lines)
        if len(of_faces) != len(rows):
            raise ValueError(f"{len(of_faces)} faces are {len(rows)} triangles")
        layout = None
        if len(names) > 1:
            chosen = [by_name.get(name, materials.Material()) for name in names]
            if not any(material.picture for material in chosen):
                raise _without_texture(path)
            colors, normals = materials.read_pictures(path.parent, chosen)
            layout = materials.Layout.of([(c.shape[1], c.shape[0]) for c in colors])
            pictures = [layout.filled(colors)]
            pictures += [] if normals is None else [layout.filled(normals)]
        else:
            pictures = _pictures_of(path, by_name, names)
    except FileNotFoundError as error:
        raise UserError(
            f"{error.filename}: no such file; extract the textured mesh again"
        ) from error
    except IMAGE_ERRORS as error:
        reason = " ".join(str(error).split())
        raise UserError(
            f"{path}: damaged, or not a textured mesh of triangles ({reason}); extract it again"
        ) from error
    # Written so that it is false of NaN; what float32 cannot hold would become infinite below.
    if not all((np.abs(table) <= np.finfo(np.float32).max).all() for table in (vertices, points)):
        raise UserError(f"{path}: has vertices with NaN or infinity; extract it again")
    if not len(rows):
        raise UserError(f"{path}: has no triangles; extract it again")
    for values, table in ((rows[..., 0], vertices), (rows[..., 1], points)):
        if values.size and not 0 <= values.min() <= values.max() < len(table):
            raise UserError(f"{path}: a face refers to a row that is not there; extract it again")
    uvs = points[rows[..., 1]]
    if layout is not None:
        uvs = layout.moved(uvs, of_faces, path)
    arrays = vertices.astype(np.float32), rows[..., 0].copy(), uvs.astype(np.float32), *pictures
    return TexturedMesh(*(torch.from_numpy(array) for array in arrays))


def _pictures_of(
    path: Path, by_name: Mapping[str, Material], names: Sequence[str]
) -> list[np.ndarray]:
    """The picture of the only material of a mesh, and its normals if it has some."""
    with_picture = [material for material in by_name.values() if material.picture is not None]
    material = by_name.get(names[0]) if names else None
    if material is None or material.picture is None:
        material = next(iter(with_picture), None)
    if material is None:
        raise _without_texture(path)
    pictures = (material.picture, material.normals)
    return [materials.read_picture(path.parent, name) for name in pictures if name is not None]


def _table(lines: list[bytes], prefix: bytes, width: int, dtype: type) -> np.ndarray:
    """The numbers of all lines of one kind. (N, width)"""
    skip = len(prefix)
    text = b" ".join([line[skip:] for line in lines if line.startswith(prefix)])
    return np.array(text.replace(b"/", b" ").split(), dtype=dtype).reshape(-1, width)


def _value(lines: list[bytes], prefix: bytes, path: Path) -> str:
    for line in lines:
        if line.startswith(prefix):
            return materials.name_of(line[len(prefix) :])
    raise _without_texture(path)


def _without_texture(path: Path) -> UserError:
    return UserError(f"{path}: has no texture; pass a mesh that the texture stage wrote")


@torch.no_grad()
def render_textured(
    mesh: TexturedMesh, camera: Camera, background: Tensor | None = None, *, supersampling: int = 1
) -> Tensor:
    """Render the first hit of every pixel with the bilinear colour of the texture. (H, W, 3)

    Args:
        background: Colour behind the mesh, (3,) or of each sample; black when None.
    """
    device = mesh.vertices.device
    fine = camera.resized(camera.width * supersampling, camera.height * supersampling)
    hits = rasterize_triangles(mesh.vertices, mesh.faces, fine)
    image = torch.zeros(fine.height, fine.width, 3, device=device)
    if background is not None:
        image[:] = background.to(image)
    covered = hits.covered
    uvs = mesh.uvs[hits.face[covered].long()]
    at = (hits.barycentrics[covered][..., None] * uvs).sum(dim=1)
    image[covered] = sample_texture(mesh.texture, at)
    if supersampling == 1:
        return image
    shape = (camera.height, supersampling, camera.width, supersampling, 3)
    return image.reshape(shape).mean(dim=(1, 3))


def sample_texture(texture: Tensor, uvs: Tensor) -> Tensor:
    """Bilinear colours of a texture, (H, W, 3) uint8, at coordinates, (P, 2), v upwards. (P, 3)"""
    height, width, _ = texture.shape
    x = (uvs[:, 0] * width - 0.5).clamp(0, width - 1)
    y = ((1 - uvs[:, 1]) * height - 0.5).clamp(0, height - 1)
    left, top = x.floor(), y.floor()
    x_share, y_share = (x - left)[:, None], (y - top)[:, None]
    x0, y0 = left.long(), top.long()
    x1, y1 = (x0 + 1).clamp_max(width - 1), (y0 + 1).clamp_max(height - 1)
    texels = texture.reshape(-1, 3)

    def along(y: Tensor) -> Tensor:
        left, right = (texels.index_select(0, y * width + x) for x in (x0, x1))
        return left * (1 - x_share) + right * x_share

    return (along(y0) * (1 - y_share) + along(y1) * y_share) / 255


FLAT = 128, 128, 255  # a normal that does not differ from the mesh's own


def vertex_normals(vertices: Tensor, faces: Tensor) -> Tensor:
    """Unit normals, those of adjacent faces weighted by area. (V, 3), (F, 3) -> (V, 3)"""
    a, b, c = vertices[faces].unbind(1)
    sums = torch.zeros_like(vertices)
    sums.index_add_(0, faces.flatten(), torch.linalg.cross(b - a, c - a).repeat_interleave(3, 0))
    return normalize(sums, dim=1)


def corner_tangents(vertices: Tensor, faces: Tensor, uvs: Tensor, normals: Tensor) -> Tensor:
    """Tangents at the corners, and w, the side of the bitangent. (F, 3, 4)

    Texture coordinates, v upwards, (F, 3, 2), are of no two faces the same. normals: (V, 3)
    """
    corners, normals = vertices[faces], normals[faces]
    (e1, e2), (d1, d2) = ((x[:, 1:] - x[:, :1]).unbind(1) for x in (corners, uvs))
    side = torch.where(d1[:, 0] * d2[:, 1] < d1[:, 1] * d2[:, 0], -1.0, 1.0)
    along_u = (e1 * d2[:, 1:] - e2 * d1[:, 1:]) * side[:, None]
    along_u = along_u[:, None].expand_as(normals)
    tangents = normalize(along_u - normals * (normals * along_u).sum(dim=2, keepdim=True), dim=2)
    return torch.cat([tangents, side[:, None, None].expand(-1, 3, 1)], dim=2)


def tangent_frames(normals: Tensor, tangents: Tensor, weights: Tensor) -> Tensor:
    """Axes T, B and N as columns at places of faces. (P, 3, 3)

    normals, tangents: at the corners of their faces, (P, 3, 3) and (P, 3, 4); weights: barycentric
    coordinates, (P, 3)
    """
    normal = normalize((normals * weights[..., None]).sum(dim=1), dim=1)
    tangent = normalize((tangents[..., :3] * weights[..., None]).sum(dim=1), dim=1)
    bitangent = torch.linalg.cross(normal, tangent) * tangents[:, 0, 3:]
    return torch.stack([tangent, bitangent, normal], dim=2)


def encoded(normals: Tensor, frames: Tensor) -> Tensor:
    """World normals as colours of a normal map. (P, 3), (P, 3, 3) -> (P, 3) uint8"""
    one = torch.eye(3, dtype=frames.dtype, device=frames.device)
    usable = torch.linalg.det(frames).abs() > 1e-3
    own = torch.linalg.solve(torch.where(usable[:, None, None], frames, one), normals)
    colors = ((normalize(own, dim=1) + 1) * 127.5).round().to(torch.uint8)
    return torch.where(usable[:, None], colors, colors.new_tensor(FLAT))
