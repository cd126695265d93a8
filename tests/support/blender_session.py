# SPDX-License-Identifier: Apache-2.0
"""Run by the Python of Blender: install the extension, import a scan, and do what a test wants.

``python blender_session.py WORK.json`` with a list of steps, each the name of a function here and
its keywords. Prints one line of JSON with what they returned.
"""

import importlib
import json
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import bpy
import numpy as np

EXTENSION = "bl_ext.user_default.sugar_scan"
FACTORY_OBJECTS = ("Cube", "Light", "Camera")


def install(package: str, python: str, folder: str) -> list[str]:
    """Install the extension as a user does, and fill in its preferences."""
    bpy.ops.extensions.package_install_files(
        filepath=package, repo="user_default", enable_on_install=True
    )
    preferences = bpy.context.preferences.addons[EXTENSION].preferences
    preferences.python = python
    preferences.folder = folder
    for factory in FACTORY_OBJECTS:
        bpy.data.objects.remove(bpy.data.objects[factory])
    return list(bpy.context.preferences.addons.keys())


def validate(package: str) -> list:
    """Check the package as Blender's platform for extensions does; the exit code and the text."""
    scripts = Path(bpy.utils.system_resource("SCRIPTS"))
    tool = scripts / "addons_core" / "bl_pkg" / "cli" / "blender_ext.py"
    command = [sys.executable, str(tool), "validate", package]
    finished = subprocess.run(command, capture_output=True, text=True)
    return [finished.returncode, finished.stdout + finished.stderr]


def load(**options: object) -> list[tuple[str, str]]:
    """Import a scan; return the names and kinds of all objects."""
    bpy.ops.sugar_scan.import_result(**options)
    return [(one.name, one.type) for one in bpy.data.objects]


def error_of(operator: str, **options: object) -> str:
    """Call an operator that fails and return its message."""
    try:
        getattr(bpy.ops.sugar_scan, operator)(**options)
    except RuntimeError as error:
        return str(error)
    return ""


def render(camera: str, target: str) -> None:
    """Render what a photograph shows, without noise and with a box around each pixel."""
    activate(camera)
    bpy.ops.sugar_scan.look_through()
    scene = bpy.context.scene
    scene.render.engine = "CYCLES"
    scene.cycles.device = "CPU"
    scene.cycles.samples = 64
    scene.cycles.use_denoising = False
    scene.cycles.pixel_filter_type = "BOX"
    scene.render.film_transparent = True
    scene.render.threads_mode = "FIXED"
    scene.render.threads = 1
    scene.render.filepath = target
    bpy.ops.render.render(write_still=True)


def activate(name: str) -> None:
    """Make an object the active one."""
    bpy.context.view_layer.objects.active = bpy.data.objects[name]


def hide(names: list[str]) -> None:
    """Hide objects in renders."""
    for name in names:
        bpy.data.objects[name].hide_render = True


def world_box(name: str) -> list[list[float]]:
    """Return the lowest and highest corner of an object in Blender's world."""
    shown = bpy.data.objects[name].evaluated_get(bpy.context.evaluated_depsgraph_get())
    corners = np.array([shown.matrix_world @ vertex.co for vertex in shown.data.vertices])
    return [corners.min(axis=0).tolist(), corners.max(axis=0).tolist()]


def attributes(name: str) -> dict[str, int]:
    """Return the attributes of an object's vertices, and how many values they have."""
    data = bpy.data.objects[name].data
    return {attribute.name: len(attribute.data) for attribute in data.attributes}


def pose_and_delete(name: str, lift: float, n_deleted: int) -> None:
    """Edit a mesh: an armature lifts the upper half, and the first triangles are deleted."""
    scan = bpy.data.objects[name]
    group = scan.vertex_groups.new(name="upper")
    middle = scan_middle(scan)
    high = [vertex.index for vertex in scan.data.vertices if vertex.co.y > middle]
    group.add(high, 1.0, "REPLACE")
    armature = bpy.data.objects.new("rig", bpy.data.armatures.new("rig"))
    bpy.context.scene.collection.objects.link(armature)
    armature.parent = scan.parent
    activate("rig")
    bpy.ops.object.mode_set(mode="EDIT")
    bone = armature.data.edit_bones.new("upper")
    bone.head = (0, 0, 0)
    bone.tail = (0, 1, 0)
    bpy.ops.object.mode_set(mode="OBJECT")
    scan.modifiers.new("rig", "ARMATURE").object = armature
    armature.pose.bones["upper"].location = (0, lift, 0)
    activate(name)
    bpy.ops.object.mode_set(mode="EDIT")
    bpy.ops.mesh.select_mode(type="FACE")
    bpy.ops.mesh.select_all(action="DESELECT")
    bpy.ops.object.mode_set(mode="OBJECT")
    for polygon in scan.data.polygons[:n_deleted]:
        polygon.select = True
    bpy.ops.object.mode_set(mode="EDIT")
    bpy.ops.mesh.delete(type="FACE")


def scan_middle(scan: bpy.types.Object) -> float:
    """Return the height between the lowest and the highest vertex."""
    heights = [vertex.co.y for vertex in scan.data.vertices]
    return (min(heights) + max(heights)) / 2


def move(name: str, offset: list[float]) -> None:
    """Move an object in its world."""
    bpy.data.objects[name].location = offset
    bpy.context.view_layer.update()


def subdivide(name: str) -> None:
    """Edit a mesh in a way that no Gaussians can follow."""
    activate(name)
    bpy.ops.object.mode_set(mode="EDIT")
    bpy.ops.mesh.select_all(action="SELECT")
    bpy.ops.mesh.subdivide()
    bpy.ops.mesh.quads_convert_to_tris()
    bpy.ops.object.mode_set(mode="OBJECT")


def export_edited(filepath: str) -> str:
    """Export the Gaussians of the active mesh; return the mode that Blender is left in."""
    bpy.ops.sugar_scan.export_edited(filepath=filepath, check_existing=False)
    return bpy.context.object.mode


def background_files(camera: str) -> list[str]:
    """Return the files of the pictures behind a camera."""
    backgrounds = bpy.data.objects[camera].data.background_images
    return [bpy.path.abspath(background.image.filepath) for background in backgrounds]


def watch(command: list[str], stops: bool) -> dict:
    """Watch a program as a window does, by events of a timer, and return all messages."""
    operators = importlib.import_module(f"{EXTENSION}.operators.background_operator")
    reports = []
    timers = []
    state = SimpleNamespace(is_running=False, wants_stop=False, text="", fraction=0.0)
    manager = SimpleNamespace(
        sugar_scan=state,
        event_timer_add=lambda interval, window: timers.append(interval),
        event_timer_remove=lambda timer: timers.pop(),
        modal_handler_add=lambda operator: None,
    )
    context = SimpleNamespace(window_manager=manager, window=None, screen=None)

    class Watcher(operators.BackgroundOperator):
        """An operator without Blender's part."""

        waits = False

        def report(self, kinds: set[str], text: str) -> None:
            reports.append([*kinds, text])

        def finished(self, context: object, progress: object) -> None:
            reports.append(["FINISHED", progress.text])

    watcher = Watcher()
    answers = [watcher.start(context, command, None)]
    texts = []
    has_stopped = False
    other = watcher.modal(context, SimpleNamespace(type="MOUSEMOVE"))
    while state.is_running:
        answers.append(watcher.modal(context, SimpleNamespace(type="TIMER")))
        if stops and state.fraction > 0 and not has_stopped:
            state.wants_stop = True
            has_stopped = True
        texts.append(state.text)
        time.sleep(0.02)
    return {
        "answers": [next(iter(answers[0])), next(iter(other)), next(iter(answers[-1]))],
        "texts": list(dict.fromkeys(texts)),
        "reports": reports,
        "timers": len(timers),
    }


def reopen(path: str) -> bool:
    """Save the file while something seems to run, open it, and return whether it still does."""
    bpy.context.window_manager.sugar_scan.is_running = True
    bpy.ops.wm.save_as_mainfile(filepath=path)
    bpy.ops.wm.open_mainfile(filepath=path)
    return bpy.context.window_manager.sugar_scan.is_running


def import_gltf(filepath: str) -> list[tuple[str, int, int]]:
    """Open a GLB by Blender's own importer; names, vertices and polygons of its meshes."""
    bpy.ops.import_scene.gltf(filepath=filepath)
    meshes = [one for one in bpy.data.objects if one.type == "MESH"]
    return [(one.name, len(one.data.vertices), len(one.data.polygons)) for one in meshes]


def run_scan(**options: object) -> list[str]:
    """Run the program to its end and return the names of all objects then."""
    bpy.ops.sugar_scan.run(**options)
    return [one.name for one in bpy.data.objects]


if __name__ == "__main__":
    work = json.loads(Path(sys.argv[1]).read_text())
    results = [globals()[step](**options) for step, options in work]
    print("RESULTS " + json.dumps(results))
