# SPDX-License-Identifier: Apache-2.0
"""Import of a folder of results."""

from pathlib import Path

import bpy
from bpy.props import BoolProperty, EnumProperty, IntProperty, StringProperty

from ..plain.errors import ScanError
from ..plain.gaussian_ply import read_gaussians
from ..plain.obj_file import read_obj
from ..plain.photographs import read_photographs
from ..plain.result_folder import ResultFolder, read_result_folder
from ..scene.camera_objects import add_cameras
from ..scene.gaussian_objects import add_ellipses, add_points, most_visible
from ..scene.mesh_objects import textured_mesh
from ..scene.scan_objects import add_object, make_root

_GAUSSIANS = [
    ("NONE", "None", "Leave the Gaussians out"),
    ("POINTS", "Points", "A point cloud with colours, opacities, scales and rotations"),
    ("ELLIPSES", "Ellipses", "Rectangles that fade as Gaussians do, for a preview"),
]


class ImportResult(bpy.types.Operator):
    """Import a scan: its mesh, the cameras of its photographs, its Gaussians"""

    bl_idname = "sugar_scan.import_result"
    bl_label = "Import scan"
    bl_options = {"REGISTER", "UNDO"}

    directory: StringProperty(name="Folder of results", subtype="DIR_PATH")
    with_mesh: BoolProperty(name="Mesh", default=True)
    lit: BoolProperty(
        name="Lit by lamps",
        description="Lamps light the mesh; else it has the colours of the photographs",
        default=False,
    )
    with_photographs: BoolProperty(
        name="Photographs",
        description="A camera for each photograph, with the photograph as its background",
        default=True,
    )
    gaussians: EnumProperty(name="Gaussians", items=_GAUSSIANS, default="NONE")
    max_gaussians: IntProperty(
        name="At most",
        description="So many Gaussians, those that cover most",
        default=200_000,
        min=1,
    )
    plain_colors: BoolProperty(
        name="Show colours as they are",
        description="Set the view transform of the scene to Standard, which leaves colours alone",
        default=True,
    )

    def invoke(self, context: bpy.types.Context, event: bpy.types.Event) -> set[str]:
        """Ask for the folder."""
        context.window_manager.fileselect_add(self)
        return {"RUNNING_MODAL"}

    def execute(self, context: bpy.types.Context) -> set[str]:
        """Import the folder."""
        try:
            result = read_result_folder(Path(bpy.path.abspath(self.directory)))
            self._import(result, context)
        except ScanError as error:
            self.report({"ERROR"}, str(error))
            return {"CANCELLED"}
        if self.plain_colors:
            context.scene.view_settings.view_transform = "Standard"
        return {"FINISHED"}

    def _import(self, result: ResultFolder, context: bpy.types.Context) -> None:
        """Read all files first, so that a damaged one leaves nothing behind."""
        obj = read_obj(result.mesh) if self.with_mesh and result.mesh is not None else None
        photographs = read_photographs(result.path) if self.with_photographs else []
        gaussians = None
        if self.gaussians != "NONE" and result.splats is not None:
            gaussians = most_visible(read_gaussians(result.splats), self.max_gaussians)
        root = make_root(result, context)
        if obj is not None:
            name = f"{result.name} mesh"
            mesh = textured_mesh(name, obj, self.lit)
            add_object(name, mesh, root, root.users_collection[0])
        if photographs:
            add_cameras(photographs, root)
        if gaussians is not None:
            add = add_points if self.gaussians == "POINTS" else add_ellipses
            add(gaussians, root, context)
        context.view_layer.update()
