# SPDX-License-Identifier: Apache-2.0
"""A textured mesh and its Gaussians in one binary glTF, each a node that viewers can hide."""

from __future__ import annotations

from gaussian_splatting.formats.gltf_container import BinaryPart, finished_glb
from sugar_extractors.export.engines.collision_gltf import add_collider
from sugar_extractors.export.gltf_gaussians import EXTENSION, add_gaussians
from sugar_extractors.export_contents import CombinedExport
from sugar_scene.mesh_files.textured_mesh_io import MeshStyle, gltf_with_mesh, small_picture

MESH_NODE = "Mesh"
GAUSSIANS_NODE = "Gaussians"


def write_combined_glb(export: CombinedExport) -> None:
    """Write a GLB with a node for the mesh and one for the Gaussians.

    ``KHR_gaussian_splatting`` is used, not required: programs without it open the mesh, and show
    the Gaussians as points with their colours.

    Raises:
        UserError: The file would be larger than 4 GiB.
    """
    binary = BinaryPart()
    style = MeshStyle(y_up=True, lit=export.lit)
    picture = small_picture(export.mesh.texture)
    content = gltf_with_mesh(binary, export.mesh, picture, MESH_NODE, style)
    primitive = add_gaussians(binary, export.cloud)
    content["meshes"].append({"name": GAUSSIANS_NODE, "primitives": [primitive]})
    content["nodes"].append({"name": GAUSSIANS_NODE, "mesh": len(content["meshes"]) - 1})
    content["scenes"][0]["nodes"].append(len(content["nodes"]) - 1)
    if export.collider is not None:
        add_collider(content, binary, export.collider, MESH_NODE, y_up=True)
    content.setdefault("extensionsUsed", []).append(EXTENSION)
    advice = "use --to glb and --to spz"
    with export.path.open("wb") as file:
        file.writelines(finished_glb(content, binary, export.target, advice))
