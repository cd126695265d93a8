# SPDX-License-Identifier: Apache-2.0
"""``train.py --doctor``: whether machine, scene and checkpoint will train, and what to fix."""

from __future__ import annotations

import argparse

from gaussian_splatting.data.masks import MaskOptions
from gaussian_splatting.data.observations import ViewOptions
from gaussian_splatting.data.scene import load_scene
from sugar_pipeline.doctor.findings import Finding, show
from sugar_pipeline.doctor.machine_checkup import machine_findings
from sugar_pipeline.doctor.scene_checkup import gaussian_findings, memory_finding, scene_findings
from sugar_trainers.capture import load_views
from sugar_trainers.image_size import SugarSize
from sugar_trainers.multiview_options import options_of_mode
from sugar_utils.console import Console
from sugar_utils.errors import UserError
from sugar_utils.settings import from_args


def run_doctor(args: argparse.Namespace) -> None:
    """Look at everything, print it with what to do, and train nothing.

    Args:
        args: Flags of ``train.py``; scene and checkpoint may be missing.

    Raises:
        UserError: At least one problem was found; all were printed before.
    """
    console = Console()
    found = machine_findings(args.device, args.gpu, args.output_dir)
    show(console, "machine", found)
    if args.scene_path is not None:
        try:
            found += _capture_findings(args, console)
        except UserError as error:
            found.append(Finding("scene", "cannot be used", "problem", str(error)))
            show(console, "scene", found[-1:])
    n_problems = sum(finding.state == "problem" for finding in found)
    n_warnings = sum(finding.state == "warning" for finding in found)
    if n_problems:
        raise UserError(f"the doctor found {n_problems} problem(s), see the arrows above")
    console.info(f"no problems, {n_warnings} warning(s)")


def _capture_findings(args: argparse.Namespace, console: Console) -> list[Finding]:
    notes: list[str] = []
    if args.checkpoint_path is None:
        scene = load_scene(
            args.scene_path,
            size_rule=from_args(SugarSize, args),
            images_dir=args.images or "images",
            eval_split=args.eval,
            masks=from_args(MaskOptions, args),
            view_options=from_args(ViewOptions, args),
            notify=notes.append,
        )
        found = [*scene_findings(scene), *_notes(notes)]
        show(console, scene.description, found)
        return found
    options = options_of_mode(args, args.regularization_type or "dn_consistency", args.output_dir)
    checkpoint, scene = load_views(options, notes.append, require_images=True)
    found = scene_findings(scene)
    show(console, scene.description, [*found, *_notes(notes)])
    cloud = checkpoint.read_cloud(notes.append)
    if len(cloud) == 0:
        raise UserError(f"{checkpoint.ply_path} holds no Gaussians; train the vanilla stage again")
    of_cloud = gaussian_findings(cloud, scene)
    if scene.extent > 0:
        of_cloud.append(memory_finding(cloud, options, scene))
    show(console, str(checkpoint.ply_path), of_cloud)
    return [*found, *_notes(notes), *of_cloud]


def _notes(notes: list[str]) -> list[Finding]:
    """What reading had to say."""
    return [Finding("note", note, "warning") for note in notes]
