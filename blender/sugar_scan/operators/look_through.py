# SPDX-License-Identifier: Apache-2.0
"""Look through the camera of a photograph."""

import bpy

from ..scene.camera_objects import is_photograph, look_through


class LookThrough(bpy.types.Operator):
    """Look through the selected camera, with renders in the size of its photograph"""

    bl_idname = "sugar_scan.look_through"
    bl_label = "Look through photograph"
    bl_options = {"REGISTER", "UNDO"}

    @classmethod
    def poll(cls, context: bpy.types.Context) -> bool:
        """Only cameras of photographs have a size."""
        return is_photograph(context.object)

    def execute(self, context: bpy.types.Context) -> set[str]:
        """Make it the camera of the scene and of the views in which the scene is shown."""
        look_through(context.object, context.scene)
        for area in context.screen.areas if context.screen else ():
            if area.type == "VIEW_3D":
                area.spaces.active.region_3d.view_perspective = "CAMERA"
        return {"FINISHED"}
