# SPDX-License-Identifier: Apache-2.0
"""Command lines of the program, which runs outside of Blender with a Python of its own."""

import os
import shlex
import shutil
from dataclasses import dataclass
from pathlib import Path

from .errors import ScanError

PRESETS = ("fast", "reference")
_MODULE = "sugar_pipeline"
_COMMAND = "sugar"
# Settings of Blender's own Python would keep another one from its packages.
_BLENDERS_VARIABLES = ("PYTHONHOME", "PYTHONPATH", "PYTHONSTARTUP")


@dataclass(frozen=True)
class Program:
    """The way in which the program is started.

    An installed package needs its Python alone, a copy of the repository also its folder; without
    either the command ``sugar`` is looked for.
    """

    python: str = ""  # path of the interpreter that has the packages
    folder: str = ""  # of the repository, where the package is not installed

    def words(self, *arguments: str) -> list[str]:
        """Return a command line.

        Raises:
            ScanError: The interpreter or the folder is not there.
        """
        if self.folder and not (Path(self.folder) / _MODULE).is_dir():
            raise ScanError(f"{self.folder}: is not the folder of the program; see the preferences")
        if not self.python:
            command = shutil.which(_COMMAND)
            if command is None:
                raise ScanError("name the Python of the program in the preferences of this add-on")
            return [command, *arguments]
        if not Path(self.python).is_file():
            raise ScanError(f"{self.python}: no such file; see the preferences of this add-on")
        return [self.python, "-m", _MODULE, *arguments]

    @property
    def working_directory(self) -> str | None:
        """Folder in which it has to start; None where that does not matter."""
        return self.folder or None


def environment() -> dict[str, str]:
    """Return the variables of the program's process: lines appear at once, in UTF-8."""
    variables = dict(os.environ)
    for name in _BLENDERS_VARIABLES:
        variables.pop(name, None)
    return variables | {"PYTHONUNBUFFERED": "1", "PYTHONUTF8": "1"}


def run_arguments(source: Path, output: Path, preset: str, more: str = "") -> list[str]:
    """Return the words that turn photographs, a video or a scene into a textured mesh.

    Args:
        source: Folder of photographs or of a scene, or a video.
        output: Folder for all that is made.
        preset: One of :data:`PRESETS`.
        more: Further flags, as on a command line.
    """
    try:
        flags = shlex.split(more, posix=os.name == "posix")
    except ValueError as error:
        raise ScanError(f"more flags: {error}") from error
    return ["run", "-s", str(source), "--output_dir", str(output), "--preset", preset, *flags]


def export_arguments(model: Path, edited: Path, target: Path) -> list[str]:
    """Return the words that write the Gaussians of a model on its edited mesh.

    Args:
        model: The ``.pt`` of the refined model.
        edited: The OBJ of the edited mesh.
        target: File to write; its suffix is the format.
    """
    to = target.suffix.lower().removeprefix(".")
    words = ["export", str(model), "--to", to, "--output", str(target)]
    return [*words, "--repose", str(edited), "--overwrite", "True"]
