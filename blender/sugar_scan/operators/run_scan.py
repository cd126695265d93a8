# SPDX-License-Identifier: Apache-2.0
"""Photographs to a textured mesh, in the background."""

from pathlib import Path

import bpy
from bpy.props import EnumProperty, StringProperty

from ..plain.commands import PRESETS, run_arguments
from ..plain.errors import ScanError
from ..plain.progress import Progress
from .background_operator import BackgroundOperator, run_state


class RunScan(BackgroundOperator, bpy.types.Operator):
    """Make a textured mesh of photographs, a video or a scene, and import it"""

    bl_idname = "sugar_scan.run"
    bl_label = "Make a scan"

    source: StringProperty(
        name="Photographs",
        description="Folder of photographs, a video, or a scene with cameras",
        subtype="FILE_PATH",
    )
    output: StringProperty(
        name="Output", description="Folder for all that is made", subtype="DIR_PATH"
    )
    preset: EnumProperty(
        name="Preset",
        items=[(name, name.capitalize(), "") for name in PRESETS],
        default=PRESETS[0],
    )
    more: StringProperty(
        name="More flags", description="Further flags of the command, as --minutes 15"
    )

    def invoke(self, context: bpy.types.Context, event: bpy.types.Event) -> set[str]:
        """Ask for the paths."""
        return context.window_manager.invoke_props_dialog(self, width=450)

    def arguments(self, context: bpy.types.Context) -> list[str]:
        """Return the arguments of the run."""
        source = self._path(self.source, "photographs")
        output = self._path(self.output, "output")
        if not source.exists():
            raise ScanError(f"{source}: no such file or folder")
        return run_arguments(source, output, self.preset, self.more)

    def finished(self, context: bpy.types.Context, progress: Progress) -> None:
        """Import the results."""
        if progress.results is None:
            raise ScanError("the program made no folder of results; see its log.txt")
        try:
            bpy.ops.sugar_scan.import_result(directory=str(progress.results))
        except RuntimeError as error:
            # That is how operators tell scripts what they report.
            raise ScanError(str(error).strip().removeprefix("Error: ")) from error

    def _path(self, text: str, what: str) -> Path:
        if not text:
            raise ScanError(f"name the {what}")
        return Path(bpy.path.abspath(text)).resolve()


class StopScan(bpy.types.Operator):
    """Save a checkpoint and stop; the same run goes on from it later"""

    bl_idname = "sugar_scan.stop"
    bl_label = "Stop"

    @classmethod
    def poll(cls, context: bpy.types.Context) -> bool:
        """Only what runs can be stopped."""
        return run_state(context).is_running

    def execute(self, context: bpy.types.Context) -> set[str]:
        """Leave the wish for the operator that runs the program."""
        run_state(context).wants_stop = True
        return {"FINISHED"}
