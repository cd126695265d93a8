# SPDX-License-Identifier: Apache-2.0
"""The flags of the page that shows a running training."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from sugar_utils.flags import integer
from sugar_utils.settings import flag

DEFAULT_PORT = 8080
LOCALHOST = "localhost"
_HIGHEST_PORT = 65_535


def port_number(text: str) -> int:
    """A port that a page can be served on."""
    value = integer(text)
    if not 1 <= value <= _HIGHEST_PORT:
        raise argparse.ArgumentTypeError(f"{text!r} is no port; choose 1024 to {_HIGHEST_PORT}")
    return value


@dataclass(frozen=True)
class ViewerOptions:
    """Whether a training can be watched in a browser; nothing of it changes the result."""

    viewer: int | None = flag(
        None, "show the model while it trains on a page in the browser, at this port of the "
        f"machine ({DEFAULT_PORT} where none is named)", group="run", parse=port_number, nargs="?",
        const=DEFAULT_PORT, metavar="PORT",
    )  # fmt: skip
    viewer_host: str = flag(
        LOCALHOST, "address that the page is served on; 0.0.0.0 lets other machines look, and "
        "pause the run", group="run", idle="without --viewer",
    )  # fmt: skip
