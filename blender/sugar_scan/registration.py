# SPDX-License-Identifier: Apache-2.0
"""The classes of the extension that Blender has to know, and their places in its menus."""

import bpy

from . import panel, preferences
from .operators import background_operator, export_edited, import_result, look_through, run_scan

_CLASSES = (
    preferences.ScanPreferences,
    background_operator.RunState,
    import_result.ImportResult,
    look_through.LookThrough,
    export_edited.ExportEdited,
    run_scan.RunScan,
    run_scan.StopScan,
    panel.ScanPanel,
)


def register() -> None:
    """Register all classes, and the entry of the menu File > Import."""
    for kind in _CLASSES:
        bpy.utils.register_class(kind)
    state = bpy.props.PointerProperty(type=background_operator.RunState)
    bpy.types.WindowManager.sugar_scan = state
    bpy.types.TOPBAR_MT_file_import.append(_draw_import_entry)
    bpy.app.handlers.load_post.append(_after_loading)


def unregister() -> None:
    """Take the entry and the classes away, the last one first."""
    bpy.app.handlers.load_post.remove(_after_loading)
    bpy.types.TOPBAR_MT_file_import.remove(_draw_import_entry)
    del bpy.types.WindowManager.sugar_scan
    for kind in reversed(_CLASSES):
        bpy.utils.unregister_class(kind)


@bpy.app.handlers.persistent
def _after_loading(*arguments: object) -> None:
    """Called by Blender after it opened a file, which ends what ran before."""
    background_operator.forget_run()


def _draw_import_entry(menu: bpy.types.Menu, context: bpy.types.Context) -> None:
    menu.layout.operator(
        import_result.ImportResult.bl_idname, text="SuGaR scan (folder of results)"
    )
