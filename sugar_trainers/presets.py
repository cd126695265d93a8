# SPDX-License-Identifier: Apache-2.0
"""What ``--preset fast`` chooses of SuGaR's stages; vanilla's part is in its own settings."""

from __future__ import annotations

import argparse

from sugar_utils.flags import AUTO

FAST = {
    "sdf_samples": AUTO,
    "surface_points": AUTO,
    "poisson_depth": AUTO,
}
"""Flags, and what they are; each measured as good as the reference (``DOCS/BENCHMARKS.md``)."""


def with_preset(args: argparse.Namespace) -> argparse.Namespace:
    """The flags with what the preset chooses where it is not given."""
    resolved = argparse.Namespace(**vars(args))
    if args.preset == "fast":
        for name, value in FAST.items():
            if getattr(args, name, value) is None:
                setattr(resolved, name, value)
    return resolved
