# SPDX-License-Identifier: Apache-2.0
"""Command lines of this program in messages, worded as the user starts it."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

SCRIPTS = {
    "demo": "train.py --demo",
    "run": "train_full_pipeline.py",
    "train": "train.py",
    "convert": "gaussian_splatting/convert.py",
    "vanilla": "gaussian_splatting/train.py",
    "mesh": "extract_mesh.py",
    "refine": "train_refined.py",
    "texture": "extract_refined_mesh_with_texture.py",
    "metrics": "metrics.py",
    "doctor": "train.py --doctor",
}
"""Scripts in the repository, by the verb of ``sugar`` that does the same; other verbs have none."""
_ROOT = Path(__file__).resolve().parent.parent


def command_text(verb: str, *words: object, root: Path = _ROOT) -> str:
    """Return the command line of a verb: ``sugar VERB``, or its form without an installation.

    Args:
        verb: A verb of ``sugar``.
        words: The words that follow it; quoted where a shell would divide them.
        root: Folder of the packages. A package that was installed has no scripts there.
    """
    is_sugar = Path(sys.argv[0]).stem == "sugar"
    has_scripts = (root / SCRIPTS["train"]).is_file()
    if is_sugar or not has_scripts:
        program = f"sugar {verb}"
    else:
        program = f"python {SCRIPTS.get(verb, f'-m sugar_pipeline {verb}')}"
    texts = [str(word) for word in words]
    arguments = subprocess.list2cmdline(texts) if os.name == "nt" else shlex.join(texts)
    return f"{program} {arguments}".rstrip()
