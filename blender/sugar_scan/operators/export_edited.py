# SPDX-License-Identifier: Apache-2.0
"""Gaussians that follow an edited mesh, as PLY or SPZ."""

from pathlib import Path

import bpy
from bpy.props import EnumProperty, StringProperty
from bpy_extras.io_utils import ExportHelper

from ..plain.commands import export_arguments
from ..plain.edited_mesh import write_edited
from ..plain.errors import ScanError
from ..plain.progress import Progress
from ..plain.result_folder import read_result_folder
from ..scene.mesh_objects import VERTEX_NUMBER, edited_arrays
from ..scene.scan_objects import folder_of, root_of
from .background_operator import BackgroundOperator

_FORMATS = [
    (".ply", "PLY", "For all programs for Gaussians"),
    (".spz", "SPZ", "For phones and web pages, a tenth of the size"),
]
_EDITED = "sugar_scan_edited.obj"


class ExportEdited(BackgroundOperator, ExportHelper, bpy.types.Operator):
    """Write the Gaussians of a scan as they lie on its mesh after it was edited"""

    bl_idname = "sugar_scan.export_edited"
    bl_label = "Export edited Gaussians"

    filename_ext: EnumProperty(name="Format", items=_FORMATS, default=".ply")
    filter_glob: StringProperty(default="*.ply;*.spz", options={"HIDDEN"})

    @classmethod
    def poll(cls, context: bpy.types.Context) -> bool:
        """It takes the mesh of a scan."""
        chosen = context.object
        is_mesh = chosen is not None and chosen.type == "MESH"
        return is_mesh and VERTEX_NUMBER in chosen.data.attributes

    def arguments(self, context: bpy.types.Context) -> list[str]:
        """Write the edited mesh, and return the arguments that export it."""
        target = Path(bpy.path.abspath(self.filepath)).resolve()
        if target.suffix.lower() not in (suffix for suffix, *_ in _FORMATS):
            raise ScanError(f"{target}: name a .ply or .spz")
        edited = Path(bpy.app.tempdir) / _EDITED
        model = self._write_edited(edited, context)
        return export_arguments(model, edited, target)

    def finished(self, context: bpy.types.Context, progress: Progress) -> None:
        """Say where the file is."""
        self.report({"INFO"}, f"wrote {self.filepath}")

    def _write_edited(self, path: Path, context: bpy.types.Context) -> Path:
        """Write the edited mesh for the program, and return the model that it belongs to."""
        root = root_of(context.object)
        if root is None:
            raise ScanError(f"{context.object.name}: lost its scan; import it again")
        result = read_result_folder(folder_of(root))
        if result.model is None:
            raise ScanError(
                f"{result.path}: its refined model is not where it was; keep the output folder "
                "of the run together"
            )
        edited = edited_arrays(context.object, root, context)
        write_edited(path, result, edited.numbers, edited.vertices, edited.faces)
        return result.model
