# SPDX-License-Identifier: Apache-2.0
"""The flags of the texture stage."""

from __future__ import annotations

import argparse
from dataclasses import replace

from gaussian_splatting.compute import DeviceFlags
from sugar_extractors.texture.texturing import TextureOptions
from sugar_utils.settings import add_flags, from_args, parser_of

STANDALONE_SQUARE_SIZE = 10
_ALONE = "only extract_refined_mesh_with_texture.py"


def texture_parser(description: str | None) -> argparse.ArgumentParser:
    """All flags of ``extract_refined_mesh_with_texture.py``."""
    parser = parser_of(description)
    square = {"default": STANDALONE_SQUARE_SIZE, "group": _ALONE}
    add_flags(parser, TextureOptions, square_size=square)
    add_flags(parser, DeviceFlags, gpu={"short": "-g", "group": _ALONE}, device={"group": _ALONE})
    return parser


def texture_options(args: argparse.Namespace) -> TextureOptions:
    """The run that was asked for."""
    return replace(from_args(TextureOptions, args), compute=from_args(DeviceFlags, args).choose())
