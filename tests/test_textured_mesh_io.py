# SPDX-License-Identifier: Apache-2.0
"""Textured mesh files: their layout, what other programs read from them, and full disks."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from gaussian_splatting.formats import gltf_container
from sugar_scene.mesh_files import materials, textured_mesh_io
from sugar_scene.mesh_files.tangent_space import vertex_normals
from sugar_scene.mesh_files.textured_mesh_io import (
    MeshStyle,
    TexturedMesh,
    glb_chunks,
    png_bytes,
    read_textured_mesh,
    render_textured,
    write_textured_mesh,
)
from sugar_utils import files
from sugar_utils.errors import UserError
from tests.support.random_scenes import look_at

NAME = "sugarfine_3Dgs7000.obj"


def textured(n: int = 5, seed: int = 0) -> TexturedMesh:
    """A strip of triangles with a random picture."""
    rng = torch.Generator().manual_seed(seed)
    return TexturedMesh(
        vertices=torch.randn(n + 2, 3, generator=rng) * 1e-3 + 7.0,
        faces=torch.arange(n)[:, None] + torch.arange(3),
        uvs=torch.rand(n, 3, 2, generator=rng),
        texture=torch.randint(0, 256, (16, 16, 3), generator=rng, dtype=torch.uint8),
    )


def assert_same(found: TexturedMesh, mesh: TexturedMesh) -> None:
    assert torch.equal(found.vertices, mesh.vertices)
    assert torch.equal(found.faces, mesh.faces)
    assert torch.equal(found.uvs, mesh.uvs)
    assert torch.equal(found.texture, mesh.texture)


def test_obj_is_laid_out_as_the_original_writes_it(tmp_path):
    mesh = textured(2)
    write_textured_mesh(tmp_path / NAME, mesh, glb=False)
    text = (tmp_path / NAME).read_text()
    lines = text.split("\n")
    assert lines[:4] == ["", "mtllib sugarfine_3Dgs7000.mtl", "usemtl mesh", ""]
    assert [line.split()[0] for line in lines[4:]] == ["v"] * 4 + ["vt"] * 6 + ["f"] * 2
    assert lines[-2:] == ["f 1/1 2/2 3/3", "f 2/4 3/5 4/6"]
    material = (tmp_path / "sugarfine_3Dgs7000.mtl").read_text()
    assert material == "newmtl mesh\nmap_Kd sugarfine_3Dgs7000.png"
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".mtl", ".obj", ".png"]
    assert Image.open(tmp_path / "sugarfine_3Dgs7000.png").mode == "RGB"


def test_what_is_written_is_read_back_to_the_last_bit(tmp_path, monkeypatch):
    monkeypatch.setattr(textured_mesh_io, "_CHUNK_ROWS", 3)
    mesh = textured(11)
    paths = write_textured_mesh(tmp_path / NAME, mesh)
    assert [path.suffix for path in paths] == [".png", ".mtl", ".glb", ".obj"]
    assert_same(read_textured_mesh(tmp_path / NAME), mesh)


def corner_table(mesh, faces) -> np.ndarray:
    """Position and texture coordinate of each corner of each face. (F, 3, 5)"""
    return np.concatenate([mesh.vertices, mesh.visual.uv], axis=1)[faces]


def write_materials(folder: Path, uvs: str = "vt 0 0\nvt 1 0\nvt 0.5 1\n") -> Path:
    """Three triangles: on a red and green picture, on a blue one, and in plain yellow."""
    two = np.zeros((2, 4, 3), np.uint8)
    two[0], two[1] = (0, 255, 0), (255, 0, 0)  # green above red
    Image.fromarray(two).save(folder / "two colours.png")
    Image.new("RGB", (8, 8), (0, 0, 255)).save(folder / "blue.PNG")
    (folder / "all.mtl").write_text(
        "newmtl unused\nKd 0 0 0\n\nnewmtl first one\nmap_Kd C:\\me\\two colours.jpg\n"
        "newmtl b\nmap_Kd blue.png\nnewmtl c\nKd 1 1 0\n"
    )
    vertices = "".join(f"v {k} {k % 2} 0\n" for k in range(5))
    path = folder / "mesh.obj"
    path.write_text(
        f"mtllib all.mtl\n{vertices}{uvs}usemtl first one\nf 1/1 2/2 3/3\nusemtl b\n"
        "f 2/1 3/2 4/3\nusemtl c\nf 3/1 4/2 5/3\n"
    )
    return path


def test_pictures_of_several_materials_become_one(tmp_path):
    mesh = read_textured_mesh(write_materials(tmp_path))
    assert mesh.n_faces == 3
    assert float(mesh.uvs.min()) >= 0
    assert float(mesh.uvs.max()) <= 1
    colors = textured_mesh_io.sample_texture(mesh.texture, mesh.uvs.reshape(-1, 2)) * 255
    red, green, blue, yellow = [255, 0, 0], [0, 255, 0], [0, 0, 255], [255, 255, 0]
    assert colors.round().int().tolist() == [red, red, green, *[blue] * 3, *[yellow] * 3]


@pytest.mark.parametrize("encoding", ["utf-8", "cp1252"])
def test_names_of_materials_and_their_files_are_looked_up(tmp_path, encoding):
    path = write_materials(tmp_path)
    (tmp_path / "blue.PNG").rename(tmp_path / "Größe.png")
    for file in (path, tmp_path / "all.mtl"):
        text = file.read_text().replace("blue", "Größe").replace("first one", "grün")
        file.write_bytes(text.replace("mtllib all", "mtllib D:\\scan\\All").encode(encoding))
    mesh = read_textured_mesh(path)
    colors = textured_mesh_io.sample_texture(mesh.texture, mesh.uvs[1]) * 255
    assert colors.round().int().tolist() == [[0, 0, 255]] * 3


def test_a_mesh_whose_materials_are_not_in_the_file_is_refused(tmp_path):
    path = write_materials(tmp_path)
    (tmp_path / "all.mtl").write_bytes(b"")
    with pytest.raises(UserError, match="mesh.obj: has no texture"):
        read_textured_mesh(path)


@pytest.mark.parametrize("space", [" ", "  "])
def test_faces_may_have_normals(tmp_path, space):
    path = write_materials(tmp_path)
    expected = read_textured_mesh(path)
    lines = path.read_text().splitlines()
    for number, line in enumerate(lines):
        if line.startswith("f "):
            lines[number] = "f" + "".join(f"{space}{corner}/1" for corner in line.split()[1:])
    path.write_text("\n".join(["vn 0 0 1", *lines, ""]))
    mesh = read_textured_mesh(path)
    assert torch.equal(mesh.faces, expected.faces)
    assert torch.equal(mesh.uvs, expected.uvs)


@pytest.mark.parametrize("n_materials", [1, 3])
def test_pictures_that_repeat_are_refused(tmp_path, n_materials):
    path = write_materials(tmp_path, "vt 0 0\nvt 3 0\nvt 0.5 1\n")
    if n_materials == 1:
        path.write_text(
            path.read_text().replace("usemtl first one", "usemtl b").split("usemtl c")[0]
        )
    with pytest.raises(UserError, match="mesh.obj: has faces that repeat their pictures; bake"):
        read_textured_mesh(path)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("map_Kd ", "map_kd "),
        ("map_Kd ", "\tmap_Kd\t"),
        ("map_Kd ", "map_Kd -clamp on -s 1 1 1 -bm 0.5 "),
    ],
)
def test_other_spellings_of_materials_are_read(tmp_path, before, after):
    path = write_materials(tmp_path)
    expected = read_textured_mesh(path)
    file = tmp_path / "all.mtl"
    file.write_text(file.read_text().replace(before, after))
    assert torch.equal(read_textured_mesh(path).texture, expected.texture)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("\n", "\r\n"),
        ("usemtl", "# about\nusemtl"),
        ("usemtl", "g part\ns off\no thing\nusemtl"),
        ("\nv ", "\nv  "),
    ],
)
def test_lines_without_a_meaning_are_passed_over(tmp_path, before, after):
    path = write_materials(tmp_path)
    expected = read_textured_mesh(path)
    path.write_bytes(path.read_bytes().replace(before.encode(), after.encode()))
    found = read_textured_mesh(path)
    assert torch.equal(found.vertices, expected.vertices)
    assert torch.equal(found.texture, expected.texture)


def test_pictures_that_a_material_scales_are_refused(tmp_path):
    path = write_materials(tmp_path)
    file = tmp_path / "all.mtl"
    file.write_text(file.read_text().replace("map_Kd ", "map_Kd -s 2 2 1 "))
    with pytest.raises(UserError, match=r"moves or repeats its picture by -s 2 2 1"):
        read_textured_mesh(path)


@pytest.mark.parametrize("line", ["mtllib all.mtl rest.mtl", "mtllib all.mtl\nmtllib rest.mtl"])
def test_materials_may_be_in_several_files(tmp_path, line):
    path = write_materials(tmp_path)
    expected = read_textured_mesh(path)
    file = tmp_path / "all.mtl"
    first, rest = file.read_text().split("newmtl b")
    file.write_text(first)
    (tmp_path / "rest.mtl").write_text("newmtl b" + rest)
    path.write_text(path.read_text().replace("mtllib all.mtl", line))
    assert torch.equal(read_textured_mesh(path).texture, expected.texture)


@pytest.mark.parametrize(
    ("face", "reason"),
    [
        ("f 1 2 3", "face 4 has no texture coordinates"),
        ("f 1//1 2//1 3//1", "face 4 has no texture coordinates"),
        ("f 1/1 2/2 3/3 4/1", "face 4 has 4 corners"),
        ("f -1/1 -2/2 -3/3", "face 4 counts rows from the end"),
    ],
)
def test_faces_of_other_kinds_are_named(tmp_path, face, reason):
    path = write_materials(tmp_path)
    path.write_text(path.read_text() + face + "\n")
    with pytest.raises(UserError, match=reason):
        read_textured_mesh(path)


def test_a_mesh_without_texture_coordinates_is_named(tmp_path):
    path = write_materials(tmp_path)
    text = path.read_text()
    path.write_text(text.replace("/1", "").replace("/2", "").replace("/3", ""))
    with pytest.raises(UserError, match="face 1 has no texture coordinates"):
        read_textured_mesh(path)


def test_pictures_that_are_too_large_together_become_smaller(tmp_path, monkeypatch):
    monkeypatch.setattr(materials, "LARGEST_PICTURE", 16)
    mesh = read_textured_mesh(write_materials(tmp_path))
    assert max(mesh.texture.shape[:2]) <= 16
    middle = mesh.uvs.mean(dim=1)
    colors = (textured_mesh_io.sample_texture(mesh.texture, middle) * 255).round().int().tolist()
    assert colors[1:] == [[0, 0, 255], [255, 255, 0]]


@pytest.mark.parametrize("face", ["f 1/1 2/2 3/3 4/1 5/2 1/3", "f 1/1 2/2 3/3 4/1"])
def test_faces_with_more_corners_are_refused(tmp_path, face):
    path = write_materials(tmp_path)
    path.write_text(path.read_text() + face + "\n")
    with pytest.raises(UserError, match="mesh.obj: damaged, or not a textured mesh of triangles"):
        read_textured_mesh(path)


def test_the_material_that_is_used_decides_which_picture_counts(tmp_path):
    path = write_materials(tmp_path)
    text = path.read_text()
    path.write_text(text.replace("usemtl first one", "usemtl b").replace("usemtl c", "usemtl b"))
    mesh = read_textured_mesh(path)
    assert mesh.texture.shape == (8, 8, 3)
    assert mesh.texture[0, 0].tolist() == [0, 0, 255]


def test_obj_is_read_by_trimesh(tmp_path):
    trimesh = pytest.importorskip("trimesh")
    mesh = textured(7)
    write_textured_mesh(tmp_path / NAME, mesh)
    found = trimesh.load(tmp_path / NAME, process=False)
    expected = torch.cat([mesh.vertices[mesh.faces], mesh.uvs], dim=2).numpy()
    np.testing.assert_allclose(corner_table(found, found.faces), expected, rtol=1e-6)
    assert np.array_equal(np.asarray(found.visual.material.image), mesh.texture.numpy())


def test_glb_is_read_by_trimesh_with_y_up(tmp_path, monkeypatch):
    trimesh = pytest.importorskip("trimesh")
    monkeypatch.setattr(textured_mesh_io, "_CHUNK_ROWS", 3)
    mesh = textured(7)
    write_textured_mesh(tmp_path / NAME, mesh)
    scene = trimesh.load(tmp_path / "sugarfine_3Dgs7000.glb", process=False)
    (found,) = scene.geometry.values()
    table = corner_table(found, found.faces)
    half_turn = torch.tensor([1.0, -1.0, -1.0])
    expected = torch.cat([(mesh.vertices * half_turn)[mesh.faces], mesh.uvs], dim=2).numpy()
    # trimesh turns v upwards again.
    np.testing.assert_allclose(table, expected, rtol=1e-5, atol=1e-6)
    image = found.visual.material.baseColorTexture
    assert np.array_equal(np.asarray(image.convert("RGB")), mesh.texture.numpy())
    assert found.visual.material.doubleSided


def test_glb_is_unlit_and_its_parts_are_aligned():
    mesh = textured(3)
    content = b"".join(glb_chunks(mesh, png_bytes(mesh.texture), Path("a.glb")))
    assert content[:4] == b"glTF"
    assert int.from_bytes(content[8:12], "little") == len(content)
    length = int.from_bytes(content[12:16], "little")
    assert length % 4 == 0
    description = json.loads(content[20 : 20 + length])
    assert "KHR_materials_unlit" in description["extensionsUsed"]
    assert "KHR_materials_unlit" in description["materials"][0]["extensions"]
    assert all(view["byteOffset"] % 4 == 0 for view in description["bufferViews"])
    binary = int.from_bytes(content[20 + length : 24 + length], "little")
    assert binary == description["buffers"][0]["byteLength"] == len(content) - 28 - length


def test_a_glb_of_more_than_4_gib_is_refused(monkeypatch):
    mesh = textured(3)
    monkeypatch.setattr(gltf_container, "_GLB_LIMIT", 1000)
    with pytest.raises(UserError, match=r"a\.glb: larger than .*--export_glb False"):
        next(glb_chunks(mesh, png_bytes(mesh.texture), Path("a.glb")))


@pytest.mark.parametrize("victim", ["obj_chunks", "glb_chunks", "png_bytes"])
def test_a_full_disk_leaves_the_earlier_files(tmp_path, monkeypatch, victim):
    mesh = textured(5)
    write_textured_mesh(tmp_path / NAME, mesh)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def full(*args, **kwargs):
        def chunks():
            yield b"half a file"
            raise OSError(errno.ENOSPC, "No space left on device")

        if victim == "png_bytes":
            raise UserError("cannot write: No space left on device")
        return chunks()

    monkeypatch.setattr(textured_mesh_io, victim, full)
    with pytest.raises(UserError, match="No space left on device"):
        write_textured_mesh(tmp_path / NAME, textured(6, seed=1))
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_the_obj_appears_last(tmp_path, monkeypatch):
    seen = []
    real = files._replace

    def recording(source, target):
        seen.append(target.suffix)
        real(source, target)

    monkeypatch.setattr(files, "_replace", recording)
    write_textured_mesh(tmp_path / NAME, textured())
    assert seen == [".png", ".mtl", ".glb", ".obj"]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda p: p.unlink(), "no such file"),
        (lambda p: p.with_suffix(".mtl").unlink(), "no such file"),
        (lambda p: p.with_suffix(".png").unlink(), "no such file"),
        (lambda p: p.with_suffix(".png").write_bytes(b"x"), "damaged"),
        (lambda p: p.write_bytes(p.read_bytes()[:-3]), "damaged"),
        (lambda p: p.write_bytes(p.read_bytes() + b"\nf 1/1 2/2 99/3"), "not there"),
        (lambda p: p.write_bytes(p.read_bytes() + b"\nf 1/1 2/2 " + b"9" * 20 + b"/3"), "damaged"),
        (lambda p: p.write_bytes(b"v 0 0 0\nf 1 1 1"), "no texture|damaged"),
        (lambda p: p.write_bytes(p.read_bytes().replace(b"\nf ", b"\n# ")), "no triangles"),
        (lambda p: p.write_bytes(p.read_bytes().replace(b"\nv ", b"\nv x", 1)), "damaged"),
    ],
)
def test_damaged_files_are_one_line(tmp_path, damage, message):
    path = tmp_path / NAME
    write_textured_mesh(path, textured())
    damage(path)
    with pytest.raises(UserError, match=message) as caught:
        read_textured_mesh(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("number", ["nan", "inf", "-Infinity", "1e39"])
@pytest.mark.parametrize("kind", ["v", "vt"])
def test_coordinates_that_are_no_numbers_are_refused(tmp_path, number, kind):
    path = tmp_path / NAME
    write_textured_mesh(path, textured(2), glb=False)
    lines = path.read_text().split("\n")
    first = next(row for row, line in enumerate(lines) if line.startswith(f"{kind} "))
    lines[first] = " ".join([kind, number, *lines[first].split()[2:]])
    path.write_text("\n".join(lines))
    with pytest.raises(UserError, match="NaN or infinity"):
        read_textured_mesh(path)


def seamed_ball(rings: int = 12, radius: float = 2.0) -> TexturedMesh:
    """A ball of positions that are shared, whose texture coordinates part along one meridian."""
    around = 2 * rings
    ring, step = np.mgrid[1:rings, :around].reshape(2, -1)
    theta = np.pi * ring / rings
    phi = 2 * np.pi * step / around
    middle = np.stack(
        [np.sin(theta) * np.cos(phi), np.sin(theta) * np.sin(phi), np.cos(theta)], axis=1
    )
    points = np.concatenate([middle, [[0, 0, 1], [0, 0, -1]]]) * radius
    faces = []
    uvs = []

    def add(*corners: tuple[int, int]) -> None:
        """A face of (ring, step) corners; rings 0 and ``rings`` are the poles."""
        rows = {0: len(middle), rings: len(middle) + 1}
        faces.append([rows.get(r, (r - 1) * around + s % around) for r, s in corners])
        uvs.append([(s / around, r / rings) for r, s in corners])

    for s in range(around):
        add((0, s), (1, s), (1, s + 1))
        add((rings, s), (rings - 1, s + 1), (rings - 1, s))
        for r in range(1, rings - 1):
            add((r, s), (r + 1, s), (r + 1, s + 1))
            add((r, s), (r + 1, s + 1), (r, s + 1))
    picture = np.random.default_rng(0).integers(0, 256, (64, 128, 3), dtype=np.uint8)
    return TexturedMesh(
        torch.tensor(points, dtype=torch.float32),
        torch.tensor(faces),
        torch.tensor(uvs, dtype=torch.float32),
        torch.from_numpy(picture),
    )


def parts_of(content: bytes) -> tuple[dict, bytes]:
    """The JSON and the binary part of a GLB."""
    length = int.from_bytes(content[12:16], "little")
    return json.loads(content[20 : 20 + length]), content[28 + length :]


def distinct_corners(mesh: TexturedMesh) -> int:
    corners = zip(mesh.faces.reshape(-1).tolist(), mesh.uvs.reshape(-1, 2).tolist(), strict=True)
    return len({(vertex, *uv) for vertex, uv in corners})


def test_vertices_are_shared_except_where_texture_coordinates_differ(tmp_path):
    trimesh = pytest.importorskip("trimesh")
    mesh = seamed_ball()
    style = MeshStyle(y_up=True, obj_normals=True)
    write_textured_mesh(tmp_path / "ball.obj", mesh, style=style)
    expected = distinct_corners(mesh)
    # The seam doubles a meridian; at each pole every face has its own place in the picture.
    assert len(mesh.vertices) < expected < len(mesh.vertices) + 70
    (from_glb,) = trimesh.load(tmp_path / "ball.glb", process=False).geometry.values()
    for found in (from_glb, trimesh.load(tmp_path / "ball.obj", process=False)):
        assert len(found.vertices) == expected
        outward = found.vertices / np.linalg.norm(found.vertices, axis=1, keepdims=True)
        np.testing.assert_allclose(np.linalg.norm(found.vertex_normals, axis=1), 1, atol=1e-5)
        assert (found.vertex_normals * outward).sum(axis=1).min() > 0.98
        # Both sides of the seam are shaded alike.
        places, group = np.unique(found.vertices.round(5), axis=0, return_inverse=True)
        assert len(places) == len(mesh.vertices)
        first = np.zeros((len(places), 3))
        first[group.ravel()] = found.vertex_normals
        np.testing.assert_allclose(found.vertex_normals, first[group.ravel()], atol=1e-5)
    assert_same(read_textured_mesh(tmp_path / "ball.obj"), mesh)


def test_another_program_shows_the_same_picture(tmp_path):
    """Rendered from the arrays that trimesh reads."""
    trimesh = pytest.importorskip("trimesh")
    mesh = seamed_ball()
    write_textured_mesh(tmp_path / "ball.obj", mesh, style=MeshStyle(y_up=True, obj_normals=True))
    view = look_at((5.0, 3.0, 2.0), width=96, height=80, focal=90.0, name="a")
    expected = render_textured(mesh, view)
    for suffix in (".glb", ".obj"):
        found = trimesh.load(tmp_path / f"ball{suffix}", force="mesh", process=False)
        uvs = torch.tensor(np.array(found.visual.uv), dtype=torch.float32)
        faces = torch.tensor(np.array(found.faces))
        material = found.visual.material
        image = material.baseColorTexture if suffix == ".glb" else material.image
        again = TexturedMesh(
            torch.tensor(np.array(found.vertices), dtype=torch.float32),
            faces,
            uvs[faces],
            torch.from_numpy(np.array(image.convert("RGB"))),
        )
        assert (render_textured(again, view) - expected).abs().max() < 1e-3


def test_normals_do_not_depend_on_the_size_of_the_scene():
    mesh = seamed_ball()
    normals = vertex_normals(mesh.vertices, mesh.faces)
    for scale in (1e-7, 1e6):
        found = vertex_normals(mesh.vertices * scale, mesh.faces)
        torch.testing.assert_close(found, normals, atol=1e-4, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize(("rings", "component"), [(20, 5123), (186, 5125)])
def test_a_glb_is_what_the_format_asks_for(rings, component):
    """Indices are of 32 bits where there are more than 65,535 vertices."""
    mesh = seamed_ball(rings)
    picture = png_bytes(mesh.texture)
    content = b"".join(glb_chunks(mesh, picture, Path("out/scan.glb"), MeshStyle(y_up=True)))
    told, binary = parts_of(content)
    (primitive,) = told["meshes"][0]["primitives"]
    assert set(primitive["attributes"]) == {"POSITION", "NORMAL", "TEXCOORD_0"}
    assert told["nodes"][0]["name"] == told["meshes"][0]["name"] == "scan"
    assert told["materials"][0]["name"]
    assert told["samplers"][0]["minFilter"] == 9987
    end = 0
    for view in told["bufferViews"]:
        assert view["byteOffset"] % 4 == 0
        assert view["byteOffset"] >= end
        end = view["byteOffset"] + view["byteLength"]
    assert end <= told["buffers"][0]["byteLength"] == len(binary)

    def numbers(accessor: dict, target: int) -> np.ndarray:
        view = told["bufferViews"][accessor["bufferView"]]
        assert view["target"] == target
        kind = {5123: "<u2", 5125: "<u4", 5126: "<f4"}[accessor["componentType"]]
        width = {"SCALAR": 1, "VEC2": 2, "VEC3": 3}[accessor["type"]]
        array = np.frombuffer(binary, kind, view["byteLength"] // int(kind[2]), view["byteOffset"])
        assert len(array) == width * accessor["count"]
        return array.reshape(-1, width)

    attributes = {
        name: numbers(told["accessors"][row], 34962)
        for name, row in primitive["attributes"].items()
    }
    n_vertices = distinct_corners(mesh)
    assert {len(values) for values in attributes.values()} == {n_vertices}
    places = told["accessors"][primitive["attributes"]["POSITION"]]
    assert places["min"] == attributes["POSITION"].min(axis=0).tolist()
    assert places["max"] == attributes["POSITION"].max(axis=0).tolist()
    indices = told["accessors"][primitive["indices"]]
    assert indices["componentType"] == component
    assert (n_vertices > 65_535) == (component == 5125)
    rows = numbers(indices, 34963).ravel()
    assert np.array_equal(np.unique(rows), np.arange(n_vertices))
    corners = attributes["POSITION"][rows].reshape(-1, 3, 3)
    assert np.array_equal(corners, mesh.vertices[mesh.faces].numpy())


def test_a_lit_glb_has_a_plain_material():
    mesh = textured(3)
    picture = png_bytes(mesh.texture)
    for lit in (False, True):
        content = b"".join(glb_chunks(mesh, picture, Path("a.glb"), MeshStyle(lit=lit)))
        told, _ = parts_of(content)
        (material,) = told["materials"]
        assert material["pbrMetallicRoughness"]["roughnessFactor"] == 1.0
        assert material["pbrMetallicRoughness"]["metallicFactor"] == 0.0
        assert ("extensions" in material) == ("extensionsUsed" in told) == (not lit)
