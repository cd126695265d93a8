# SPDX-License-Identifier: Apache-2.0
"""Preferences of the add-on: where the program is."""

import bpy
from bpy.props import StringProperty

from .plain.commands import Program


class ScanPreferences(bpy.types.AddonPreferences):
    """Where the program is that makes and exports scans."""

    bl_idname = __package__

    python: StringProperty(
        name="Python",
        description="Interpreter of the environment in which the program is installed; empty to "
        "look for the command sugar",
        subtype="FILE_PATH",
    )
    folder: StringProperty(
        name="Folder",
        description="Folder of the program, where it runs from a copy of its repository",
        subtype="DIR_PATH",
    )

    def draw(self, context: bpy.types.Context) -> None:
        """Draw the two paths."""
        self.layout.prop(self, "python")
        self.layout.prop(self, "folder")


def program(context: bpy.types.Context) -> Program:
    """Return how the program is started, by the preferences."""
    preferences = context.preferences.addons[__package__].preferences
    return Program(
        python=bpy.path.abspath(preferences.python),
        folder=bpy.path.abspath(preferences.folder),
    )
