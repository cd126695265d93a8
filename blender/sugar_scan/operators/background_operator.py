# SPDX-License-Identifier: Apache-2.0
"""Operators that run the program beside Blender and show how far it is."""

import time

import bpy
from bpy.props import BoolProperty, FloatProperty, StringProperty

from ..plain.background_process import BackgroundProcess
from ..plain.errors import ScanError
from ..plain.progress import Progress
from ..preferences import program

_INTERVAL = 0.25  # seconds between two looks at the output


class RunState(bpy.types.PropertyGroup):
    """Progress of the program as the panel shows it, and whether the user wants it to stop."""

    is_running: BoolProperty()
    wants_stop: BoolProperty()
    fraction: FloatProperty()
    text: StringProperty()


def forget_run() -> None:
    """Say that nothing runs; files remember what was shown when they were saved."""
    for window_manager in bpy.data.window_managers:
        window_manager.sugar_scan.is_running = False


def run_state(context: bpy.types.Context) -> RunState:
    """Return the state of the program that runs, if one does."""
    return context.window_manager.sugar_scan


class BackgroundOperator:
    """Base of operators that start the program.

    A subclass has ``arguments(context)``, the words of the command line, and
    ``finished(context, progress)``, which uses what the program made. Both may raise ScanError.

    In a window the operator is modal, and Blender stays usable. Without one, as in a script, it
    waits.
    """

    waits = bpy.app.background

    _process: BackgroundProcess
    _progress: Progress
    _was_stopped: bool

    def execute(self, context: bpy.types.Context) -> set[str]:
        """Start the program."""
        try:
            arguments = self.arguments(context)
            started = program(context)
            return self.start(context, started.words(*arguments), started.working_directory)
        except ScanError as error:
            self.report({"ERROR"}, str(error))
            return {"CANCELLED"}

    def start(self, context: bpy.types.Context, words: list[str], folder: str | None) -> set[str]:
        """Start the program.

        Raises:
            ScanError: It cannot be started, or another one runs.
        """
        state = run_state(context)
        if state.is_running:
            raise ScanError("the program runs already; wait for it, or stop it")
        self._progress = Progress()
        self._was_stopped = False
        self._process = BackgroundProcess(words, folder)
        state.is_running = True
        state.wants_stop = False
        if self.waits:
            return self._wait(context)
        window_manager = context.window_manager
        self._timer = window_manager.event_timer_add(_INTERVAL, window=context.window)
        window_manager.modal_handler_add(self)
        return {"RUNNING_MODAL"}

    def modal(self, context: bpy.types.Context, event: bpy.types.Event) -> set[str]:
        """Look at the output now and then; all other events go on to Blender."""
        if event.type != "TIMER" or self._is_running(context):
            return {"PASS_THROUGH"}
        context.window_manager.event_timer_remove(self._timer)
        return self._end(context)

    def cancel(self, context: bpy.types.Context) -> None:
        """End the program with Blender, or with the file that is closed."""
        self._process.end()
        run_state(context).is_running = False

    def _wait(self, context: bpy.types.Context) -> set[str]:
        while self._is_running(context):
            time.sleep(_INTERVAL)
        return self._end(context)

    def _is_running(self, context: bpy.types.Context) -> bool:
        """Read the output and return whether there may be more of it."""
        exit_code = self._process.exit_code
        for line in self._process.new_lines():
            self._progress.read(line)
        state = run_state(context)
        state.text = self._progress.text
        state.fraction = self._progress.fraction
        if state.wants_stop:
            state.wants_stop = False
            self._was_stopped = True
            self._process.stop()
        for area in context.screen.areas if context.screen else ():
            area.tag_redraw()
        return exit_code is None

    def _end(self, context: bpy.types.Context) -> set[str]:
        """Report how it ended."""
        run_state(context).is_running = False
        exit_code = self._process.exit_code
        if exit_code and self._was_stopped:
            self.report({"INFO"}, "stopped; the same run goes on from where it was")
            return {"CANCELLED"}
        try:
            if exit_code:
                reason = self._progress.error or f"the program ended with code {exit_code}"
                raise ScanError(reason)
            self.finished(context, self._progress)
        except ScanError as error:
            self.report({"ERROR"}, str(error))
            return {"CANCELLED"}
        return {"FINISHED"}
