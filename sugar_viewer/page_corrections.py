# SPDX-License-Identifier: Apache-2.0
"""Two corrections of the page that viser 1.1 serves.

The page is a program of JavaScript that its HTML unpacks. A few words of it are replaced as the
browser unpacks them; where another version has other words the page stays as it is.
"""

from __future__ import annotations

import gzip
import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from websockets.http11 import Response

_UNPACKED = "const code=td.decode(heap.subarray(up+ss,up+sz))"
_CORRECTIONS = (
    # Splats are squares whose corners have no z, so that the browser says "Computed radius is NaN".
    # They are drawn elsewhere, so their bounding sphere must be in sight from everywhere.
    (
        "new Float32Array([-2,-2,2,-2,2,2,-2,2]),2)",
        "new Float32Array([-2,-2,-1e15,2,-2,1e15,2,2,-1e15,-2,2,1e15]),3)",
    ),
    # A tone curve would change the colours of unlit textures, which are the photographs'.
    ("reversedDepthBuffer:!0},", "reversedDepthBuffer:!0},flat:!0,"),
)


def corrected_page(html: str) -> str:
    """Return the page with the corrections, or unchanged where they do not fit."""
    words = "".join(f".replace({json.dumps(old)},{json.dumps(new)})" for old, new in _CORRECTIONS)
    return html.replace(_UNPACKED, _UNPACKED + words)


def correct_response(response: Response | None) -> None:
    """Correct the page in a response of websockets; other responses stay as they are."""
    if response is None or not response.headers.get("Content-Type", "").startswith("text/html"):
        return
    zipped = response.headers.get("Content-Encoding") == "gzip"
    content = gzip.decompress(response.body) if zipped else response.body
    content = corrected_page(content.decode()).encode()
    response.body = gzip.compress(content) if zipped else content
    del response.headers["Content-Length"]
    response.headers["Content-Length"] = str(len(response.body))
