# SPDX-License-Identifier: Apache-2.0
"""Textured meshes as OBJ with MTL and PNG, as one GLB file, and rendered without lighting.

The OBJ is laid out as SuGaR's tools exchange it: positions, texture coordinates, then faces, and
normals of the vertices where they are wanted. Corners of faces with the same vertex and the same
texture coordinate share one line; in the atlas of the original none do, so that face i uses the
texture coordinates 3 i + 1 to 3 i + 3. The GLB has one vertex per such corner.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from gaussian_splatting.core.moved import GLB_AXES
from gaussian_splatting.data.cameras import Camera
from gaussian_splatting.data.images import IMAGE_ERRORS
from gaussian_splatting.data.world_offset import near_offset
from gaussian_splatting.formats.gltf_container import BinaryPart, finished_glb, gltf_start
from sugar_scene.mesh_files import materials
from sugar_scene.mesh_files.materials import Material
from sugar_scene.mesh_files.tangent_space import (
    corner_tangents,
    shared_corners,
    vertex_normals,
)
from sugar_scene.triangle_mesh import fits_float32
from sugar_scene.triangle_rasterizer import rasterize_triangles
from sugar_utils.device import float32_tensor
from sugar_utils.errors import Notify, UserError, reason_of
from sugar_utils.files import atomic_path, require_regular_file, without_none

_CHUNK_ROWS = 1 << 16
_LARGE_PNG = 8 << 20
_JPEG_QUALITY = 95

# Numbers of the glTF 2.0 specification.
_TRIANGLES = 4
_LINEAR = 9729
_LINEAR_MIPMAP_LINEAR = 9987
_CLAMP = 33071
_UNLIT = "KHR_materials_unlit"


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
        """Number of faces."""
        return self.faces.shape[0]

    def to(self, device: torch.device | str) -> TexturedMesh:
        """Return the mesh with all tensors on a device."""
        tensors = without_none(vars(self))
        return TexturedMesh(**{name: tensor.to(device) for name, tensor in tensors.items()})

    def corner_axes(self, rows: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return vertex normals, (R, 3, 3), and tangents, (R, 3, 4), at the corners of faces.

        Args:
            rows: The faces; None for all.
        """
        normals = written_normals(self)
        tangents = corner_tangents(self.vertices.float(), self.faces, self.uvs, normals)
        if rows is None:
            return normals[self.faces], tangents
        return normals[self.faces[rows]], tangents[rows]


def mesh_files(obj_path: Path, glb: bool, normal_map: bool = False) -> list[Path]:
    """Return the files of a textured mesh, in the order in which they appear."""
    files = []
    if normal_map:
        files.append(obj_path.with_name(f"{obj_path.stem}_normals.png"))
    files += [obj_path.with_suffix(".png"), obj_path.with_suffix(".mtl")]
    if glb:
        files.append(obj_path.with_suffix(".glb"))
    return [*files, obj_path.with_suffix(".obj")]


@dataclass(frozen=True)
class MeshStyle:
    """Style of the files of a textured mesh."""

    y_up: bool = False  # whether y is up already; else the GLB is turned from the capture's axes
    lit: bool = False  # whether viewers light the GLB; else they show the colours of the texture
    # Whether the OBJ has normals of the vertices, which the original does not write.
    obj_normals: bool = False


def write_textured_mesh(
    obj_path: Path, mesh: TexturedMesh, *, glb: bool = True, style: MeshStyle = MeshStyle()
) -> list[Path]:
    """Write OBJ, MTL, PNG and, if wanted, GLB; the OBJ last, so that its picture is there."""
    paths = mesh_files(obj_path, glb)
    with ExitStack() as stack:
        # The last one to be entered takes its final name first.
        targets = {path: stack.enter_context(atomic_path(path)) for path in reversed(paths)}
        write_mesh_files(targets, mesh, style)
    return paths


def write_mesh_files(
    targets: Mapping[Path, Path], mesh: TexturedMesh, style: MeshStyle = MeshStyle()
) -> None:
    """Write the files of a textured mesh under other names than they will have.

    Args:
        targets: For each file the path to write to.
    """
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
        file.writelines(obj_chunks(mesh, names[".mtl"].name, style.obj_normals))
    if ".glb" in names:
        write_glb(targets[names[".glb"]], mesh, names[".glb"], style, png)


def write_glb(
    target: Path, mesh: TexturedMesh, path: Path, style: MeshStyle, png: bytes | None = None
) -> None:
    """Write a GLB.

    Args:
        target: File to write to for now.
        path: Its final name, for errors.
        png: The texture as PNG; None to make it.
    """
    with target.open("wb") as file:
        file.writelines(glb_chunks(mesh, small_picture(mesh.texture, png), path, style))


def small_picture(texture: Tensor, png: bytes | None = None) -> bytes:
    """Encode a picture for files that web pages load: as JPEG where PNG is large.

    Args:
        texture: (H, W, 3) uint8
        png: It as PNG; None to make it.
    """
    png = png or png_bytes(texture)
    return png if len(png) <= _LARGE_PNG else jpeg_bytes(texture, _JPEG_QUALITY)


def png_bytes(texture: Tensor) -> bytes:
    """Encode a picture as PNG. (H, W, 3) uint8"""
    buffer = BytesIO()
    pixels = np.ascontiguousarray(texture.cpu().numpy())
    Image.fromarray(pixels).save(buffer, format="PNG", compress_level=4)
    return buffer.getvalue()


def jpeg_bytes(texture: Tensor, quality: int = 85) -> bytes:
    """Encode a picture as JPEG. (H, W, 3) uint8

    Above a quality of 90, colours are at full resolution.
    """
    buffer = BytesIO()
    chroma = 0 if quality > 90 else 2
    picture = Image.fromarray(np.ascontiguousarray(texture.cpu().numpy()))
    picture.save(buffer, format="JPEG", quality=quality, subsampling=chroma)
    return buffer.getvalue()


def obj_chunks(mesh: TexturedMesh, material_name: str, normals: bool = False) -> Iterator[bytes]:
    """Yield the text of an OBJ in parts.

    Args:
        normals: Write normals of the vertices; a mesh with a normal map always has them.
    """
    yield f"\nmtllib {material_name}\nusemtl mesh\n\n".encode()
    shared = shared_corners(mesh.faces, mesh.uvs)
    # Nine digits give every float32 back as it was.
    yield from _lines("v %.9g %.9g %.9g\n", mesh.vertices.cpu().numpy())
    yield from _lines("vt %.9g %.9g\n", shared.uvs.cpu().numpy())
    faces = mesh.faces.cpu().numpy()
    columns = [faces, shared.rows.cpu().numpy()]
    corner = "%d/%d"
    if normals or mesh.normal_map is not None:
        yield from _lines("vn %.6g %.6g %.6g\n", written_normals(mesh).cpu().numpy())
        columns.append(faces)
        corner = "%d/%d/%d"
    line = f"f {corner} {corner} {corner}\n"
    for first in range(0, len(faces), _CHUNK_ROWS):
        chunks = [column[first : first + _CHUNK_ROWS] + 1 for column in columns]
        table = np.stack(chunks, axis=2)
        text = line * len(table) % tuple(table.ravel().tolist())
        if first + len(table) == len(faces):
            # The last line has no end, as in the original.
            text = text[:-1]
        yield text.encode()


def _lines(pattern: str, rows: np.ndarray) -> Iterator[bytes]:
    """Yield a line of text for each row, (N, K), in parts."""
    for first in range(0, len(rows), _CHUNK_ROWS):
        chunk = rows[first : first + _CHUNK_ROWS]
        yield (pattern * len(chunk) % tuple(chunk.ravel().tolist())).encode()


def glb_chunks(
    mesh: TexturedMesh,
    picture: bytes,
    path: Path,
    style: MeshStyle = MeshStyle(),
) -> Iterator[bytes | memoryview]:
    """Yield a binary glTF 2.0 file in parts: one mesh with its picture.

    Args:
        picture: The texture as PNG or JPEG.
        path: Name of the file, after which the mesh is named.
    """
    binary = BinaryPart()
    content = gltf_with_mesh(binary, mesh, picture, path.stem, style)
    yield from finished_glb(content, binary, path, "use --export_glb False")


def gltf_with_mesh(
    binary: BinaryPart,
    mesh: TexturedMesh,
    picture: bytes,
    name: str,
    style: MeshStyle = MeshStyle(),
) -> dict[str, Any]:
    """Append a mesh with its picture to the binary part of a GLB and return the JSON part.

    glTF wants y up and z towards the viewer, a capture in COLMAP's axes has y down and z forward.
    ``KHR_materials_unlit`` shows the colours of the photographs; a mesh with a normal map is lit.

    Args:
        binary: The binary part, empty.
        mesh: The mesh.
        picture: The texture as PNG or JPEG.
        name: Name of the mesh and its node.
        style: Axes and light.
    """
    if not style.y_up:
        turn = mesh.vertices.new_tensor(np.diag(GLB_AXES)[:3])
        mesh = replace(mesh, vertices=mesh.vertices.float() * turn)
    material, extensions = _material(lit=style.lit or mesh.normal_map is not None)
    primitive = {
        "attributes": _add_corners(binary, mesh),
        "indices": len(binary.accessors) - 1,
        "material": 0,
        "mode": _TRIANGLES,
    }
    content = gltf_start(name, primitive, extensions)
    content["materials"] = [material]
    content["samplers"] = [
        {
            "magFilter": _LINEAR,
            "minFilter": _LINEAR_MIPMAP_LINEAR,
            "wrapS": _CLAMP,
            "wrapT": _CLAMP,
        }
    ]
    content["textures"] = [{"sampler": 0, "source": 0}]
    content["images"] = [binary.add_picture(picture)]
    if mesh.normal_map is not None:
        content["textures"].append({"sampler": 0, "source": 1})
        content["images"].append(binary.add_picture(png_bytes(mesh.normal_map)))
        material["normalTexture"] = {"index": 1}
    return content


def _add_corners(binary: BinaryPart, mesh: TexturedMesh) -> dict[str, int]:
    """Append the vertices and, last, the indices; return the accessors of the attributes."""
    tangents = sides = None
    if mesh.normal_map is not None:
        tangents = mesh.corner_axes()[1]
        sides = tangents[:, 0, 3]
    shared = shared_corners(mesh.faces, mesh.uvs, sides)
    # The picture's first row is v = 0 here.
    places = shared.uvs * shared.uvs.new_tensor([1, -1]) + shared.uvs.new_tensor([0, 1])
    attributes = {
        "POSITION": binary.add_floats(mesh.vertices[shared.vertices], bounds=True),
        "NORMAL": binary.add_floats(written_normals(mesh)[shared.vertices]),
        "TEXCOORD_0": binary.add_floats(places),
    }
    if tangents is not None:
        at_corners = tangents.new_empty(len(shared.vertices), 4)
        at_corners[shared.rows.reshape(-1)] = tangents.reshape(-1, 4)
        attributes["TANGENT"] = binary.add_floats(at_corners)
    binary.add_indices(shared.rows, len(shared.vertices))
    return attributes


def _material(lit: bool) -> tuple[dict[str, Any], list[str]]:
    """Return the material of the texture, and the extensions that it uses."""
    material: dict[str, Any] = {
        "name": "mesh",
        "doubleSided": True,
        "pbrMetallicRoughness": {
            "baseColorTexture": {"index": 0},
            "metallicFactor": 0.0,
            "roughnessFactor": 1.0,
        },
    }
    if lit:
        return material, []
    material["extensions"] = {_UNLIT: {}}
    return material, [_UNLIT]


def read_textured_mesh(
    path: Path, notify: Notify = print, offset: np.ndarray | None = None
) -> TexturedMesh:
    """Read an OBJ of triangles with texture coordinates, and the picture of its material file.

    The pictures of several materials are put together into one.

    Args:
        path: The OBJ.
        notify: Called with lines about what is left out.
        offset: That is subtracted from coordinates far from the origin, in float64; see
            :func:`~gaussian_splatting.data.world_offset.near_offset`. (3,)

    Raises:
        UserError: A file is missing or damaged, has no texture, or repeats a picture.
    """
    path = Path(path)
    lines: list[bytes] = []
    try:
        lines = require_regular_file(path, missing_ok=True).read_bytes().split(b"\n")
        vertices = _table(lines, b"v ", 3, np.float64)
        points = _table(lines, b"vt ", 2, np.float64)
        width = _numbers_per_corner(lines)
        corners = _table(lines, b"f ", 3 * width, np.int64).reshape(-1, 3, width) - 1
        n_slashes = sum(line.count(b"/") for line in lines if line.startswith(b"f "))
        if n_slashes != 3 * (width - 1) * len(corners) or (corners < -1).any():
            raise ValueError("faces of several kinds")
        vertex_rows = corners[..., 0]
        point_rows = corners[..., 1]
        by_name = _read_materials(path, lines)
        names, material_rows = materials.materials_of_faces(lines)
        if len(material_rows) != len(corners):
            raise ValueError(f"{len(material_rows)} faces are {len(corners)} triangles")
        appearance = _read_appearance(path, by_name, names)
    except FileNotFoundError as error:
        raise UserError(
            f"{error.filename}: no such file; extract the textured mesh again"
        ) from error
    except IMAGE_ERRORS as error:
        reason = _fault_of_faces(lines) or reason_of(error)
        raise UserError(
            f"{path}: damaged, or not a textured mesh of triangles ({reason}); extract it again, "
            "or export it as triangles with texture coordinates"
        ) from error
    if not (fits_float32(vertices) and fits_float32(points)):
        raise UserError(f"{path}: has vertices with NaN or infinity; extract it again")
    if not len(corners):
        raise UserError(f"{path}: has no triangles; extract it again")
    for rows, table in ((vertex_rows, vertices), (point_rows, points)):
        if rows.size and not 0 <= rows.min() <= rows.max() < len(table):
            raise UserError(f"{path}: a face refers to a row that is not there; extract it again")
    vertices = vertices - near_offset(vertices, offset, path, notify)
    uvs = points[point_rows]
    layout = appearance.layout
    if layout is None and not (0 <= uvs.min() <= uvs.max() <= 1):
        layout = materials.Layout.whole(appearance.texture)
    if layout is not None:
        uvs = layout.moved(uvs, np.minimum(material_rows, len(layout.sizes) - 1), path)
    normals = appearance.normals
    return TexturedMesh(
        vertices=float32_tensor(vertices),
        faces=torch.from_numpy(vertex_rows.copy()),
        uvs=float32_tensor(uvs),
        texture=torch.from_numpy(appearance.texture),
        normal_map=None if normals is None else torch.from_numpy(normals),
    )


class _Appearance(NamedTuple):
    """Pictures of a mesh."""

    texture: np.ndarray  # (H, W, 3) uint8
    normals: np.ndarray | None  # normal map, (H, W, 3) uint8
    layout: materials.Layout | None  # of the pictures of several materials; None for one picture


def _numbers_per_corner(lines: list[bytes]) -> int:
    """Return how many rows stand at each corner of a face: of vertex, texture and normal."""
    first_face = next((line for line in lines if line.startswith(b"f ")), b"")
    words = first_face.split()
    if len(words) < 2:
        return 2
    return max(2, 1 + words[1].count(b"/"))


def _fault_of_faces(lines: list[bytes]) -> str | None:
    """Describe the first face that is no triangle with texture coordinates; None without one."""
    faces = (line.split()[1:] for line in lines if line.startswith(b"f "))
    for number, corners in enumerate(faces, start=1):
        if len(corners) != 3:
            return f"face {number} has {len(corners)} corners"
        for corner in corners:
            rows = corner.split(b"/")
            if len(rows) < 2 or not rows[1]:
                return f"face {number} has no texture coordinates"
            if corner.startswith(b"-"):
                return f"face {number} counts rows from the end, by negative numbers"
    return None


def _read_materials(path: Path, lines: list[bytes]) -> dict[str, Material]:
    """Read the materials of an OBJ, by their names, from its material files."""
    by_name: dict[str, Material] = {}
    for line in lines:
        if line.startswith(b"mtllib "):
            names = materials.name_of(line[len(b"mtllib ") :])
            for file in materials.material_paths(path.parent, names):
                by_name.update(materials.materials_of(file.read_bytes().split(b"\n")))
    if not by_name:
        raise _without_texture(path)
    return by_name


def _read_appearance(
    path: Path, by_name: Mapping[str, Material], names: Sequence[str]
) -> _Appearance:
    """Read the pictures of the materials of an OBJ.

    Args:
        names: Of the materials that faces have.
    """
    if len(names) <= 1:
        return _single_appearance(path, by_name, names)
    chosen = [by_name.get(name, Material()) for name in names]
    if not any(material.picture for material in chosen):
        raise _without_texture(path)
    colors, normals = materials.read_pictures(path.parent, chosen)
    layout = materials.Layout.of([(color.shape[1], color.shape[0]) for color in colors])
    return _Appearance(
        texture=layout.filled(colors),
        normals=None if normals is None else layout.filled(normals),
        layout=layout,
    )


def _single_appearance(
    path: Path, by_name: Mapping[str, Material], names: Sequence[str]
) -> _Appearance:
    """Read the picture of the only material of a mesh, and its normals if it has some."""
    with_picture = [material for material in by_name.values() if material.picture is not None]
    material = by_name.get(names[0]) if names else None
    if material is None or material.picture is None:
        material = next(iter(with_picture), None)
    if material is None or material.picture is None:
        raise _without_texture(path)
    texture = materials.read_picture(path.parent, material.picture)
    normals = None
    if material.normals is not None:
        normals = materials.read_picture(path.parent, material.normals)
    return _Appearance(texture, normals, layout=None)


def _table(lines: list[bytes], prefix: bytes, width: int, dtype: type) -> np.ndarray:
    """Return the numbers of all lines with a prefix. (N, width)"""
    skip = len(prefix)
    text = b" ".join([line[skip:] for line in lines if line.startswith(prefix)])
    return np.array(text.replace(b"/", b" ").split(), dtype=dtype).reshape(-1, width)


def _without_texture(path: Path) -> UserError:
    return UserError(f"{path}: has no texture; pass a mesh that the texture stage wrote")


class MeshPicture(NamedTuple):
    """A mesh in one view."""

    image: Tensor  # colours, (H, W, 3) float in [0, 1]
    covered: Tensor  # pixels that the mesh covers, (H, W) bool


@torch.no_grad()
def render_colored(
    vertices: Tensor,
    faces: Tensor,
    camera: Camera,
    colors_at: Callable[[Tensor, Tensor], Tensor],
    background: Tensor | None = None,
) -> MeshPicture:
    """Render a mesh without lighting, with one ray for each pixel.

    Args:
        vertices: World units. (V, 3)
        faces: Rows of the vertices. (F, 3)
        camera: The view.
        colors_at: Returns colours, (P, 3), from rows of faces, (P,), and barycentrics, (P, 3).
        background: Colour behind the mesh, (3,) or of each pixel; black when None.
    """
    hits = rasterize_triangles(vertices, faces, camera)
    image = torch.zeros(camera.height, camera.width, 3, device=vertices.device)
    if background is not None:
        image[:] = background.to(image)
    covered = hits.covered
    image[covered] = colors_at(hits.face[covered].long(), hits.barycentrics[covered])
    return MeshPicture(image, covered)


@torch.no_grad()
def render_textured(
    mesh: TexturedMesh, camera: Camera, background: Tensor | None = None, *, supersampling: int = 1
) -> Tensor:
    """Render a mesh with the bilinear colours of its texture, without lighting. (H, W, 3)

    Args:
        background: Colour behind the mesh, (3,) or of each sample; black when None.
    """

    def colors_at(faces: Tensor, barycentrics: Tensor) -> Tensor:
        uvs = (barycentrics[..., None] * mesh.uvs[faces]).sum(dim=1)
        return sample_texture(mesh.texture, uvs)

    fine = camera.resized(camera.width * supersampling, camera.height * supersampling)
    image = render_colored(mesh.vertices, mesh.faces, fine, colors_at, background).image
    if supersampling == 1:
        return image
    shape = (camera.height, supersampling, camera.width, supersampling, 3)
    return image.reshape(shape).mean(dim=(1, 3))


def sample_texture(texture: Tensor, uvs: Tensor) -> Tensor:
    """Return bilinear colours of a texture at texture coordinates. (P, 3)

    Args:
        texture: (H, W, 3) uint8
        uvs: v upwards. (P, 2)
    """
    height, width, _ = texture.shape
    x = (uvs[:, 0] * width - 0.5).clamp(0, width - 1)
    y = ((1 - uvs[:, 1]) * height - 0.5).clamp(0, height - 1)
    x_floor = x.floor()
    y_floor = y.floor()
    x_share = (x - x_floor)[:, None]
    y_share = (y - y_floor)[:, None]
    x0 = x_floor.long()
    y0 = y_floor.long()
    x1 = (x0 + 1).clamp_max(width - 1)
    y1 = (y0 + 1).clamp_max(height - 1)
    texels = texture.reshape(-1, 3)

    def colors_of_row(row: Tensor) -> Tensor:
        first = texels.index_select(0, row * width + x0)
        second = texels.index_select(0, row * width + x1)
        return first * (1 - x_share) + second * x_share

    upper = colors_of_row(y0)
    lower = colors_of_row(y1)
    return (upper * (1 - y_share) + lower * y_share) / 255


def written_normals(mesh: TexturedMesh) -> Tensor:
    """Return vertex normals for files, all of length 1. (V, 3) float32"""
    normals = vertex_normals(mesh.vertices.float(), mesh.faces)
    is_missing = normals.norm(dim=1) < 0.5
    fallback = normals.new_tensor([0.0, 0.0, 1.0])
    return torch.where(is_missing[:, None], fallback, normals)
