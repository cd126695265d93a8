# SPDX-License-Identifier: Apache-2.0
"""The panel in the sidebar of the 3D view."""

import bpy

from .operators.background_operator import run_state
from .operators.export_edited import ExportEdited
from .operators.import_result import ImportResult
from .operators.look_through import LookThrough
from .operators.run_scan import RunScan, StopScan


class ScanPanel(bpy.types.Panel):
    """Buttons for scans, and how far the program is."""

    bl_idname = "VIEW3D_PT_sugar_scan"
    bl_label = "SuGaR scan"
    bl_space_type = "VIEW_3D"
    bl_region_type = "UI"
    bl_category = "Scan"

    def draw(self, context: bpy.types.Context) -> None:
        """Draw the buttons; while the program runs, its progress."""
        layout = self.layout
        layout.operator(ImportResult.bl_idname, icon="IMPORT")
        layout.operator(LookThrough.bl_idname, icon="CAMERA_DATA")
        layout.separator()
        state = run_state(context)
        if state.is_running:
            layout.progress(factor=state.fraction, text=state.text)
            layout.operator(StopScan.bl_idname, icon="CANCEL")
            return
        layout.operator(RunScan.bl_idname, icon="PLAY")
        layout.operator(ExportEdited.bl_idname, icon="EXPORT")
