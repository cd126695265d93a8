# SPDX-License-Identifier: Apache-2.0
"""The program in pages of scans: Spark and three.js, bundled, in two packed files.

``sugar_utils/web/source`` has its source. To make the files anew::

    npm --prefix sugar_utils/web/source install
    npm --prefix sugar_utils/web/source run build
    python -m sugar_extractors.export.engines.scan_program sugar_utils/web/source/bundle.js

WebAssembly is in the bundle as base64, which packs badly, and is packed by itself.
"""

from __future__ import annotations

import base64
import lzma
import re
import sys
from pathlib import Path

from sugar_utils.html import WEB

_SCRIPT = WEB / "scan-page.js.xz"
_ASSEMBLY = WEB / "scan-page.wasm.xz"
_PLACE = "@WEBASSEMBLY@"  # in the script, of the base64
_BASE64 = re.compile(r"AGFzb[A-Za-z0-9+/=]{10000,}")  # begins as all WebAssembly does


def scan_program() -> str:
    """Return the program as text for a ``script`` element."""
    script = lzma.decompress(_SCRIPT.read_bytes()).decode()
    assembly = lzma.decompress(_ASSEMBLY.read_bytes())
    return script.replace(_PLACE, base64.b64encode(assembly).decode())


def pack(bundle: Path) -> None:
    """Pack a bundle into the two files.

    Raises:
        ValueError: It does not have WebAssembly in one place, or could not stand in a page.
    """
    text = bundle.read_text(encoding="utf-8")
    (assembly,) = _BASE64.findall(text)
    if "</script" in text.lower() or _PLACE in text:
        raise ValueError(f"{bundle} cannot stand in a page")
    script = text.replace(assembly, _PLACE)
    for path, content in ((_SCRIPT, script.encode()), (_ASSEMBLY, base64.b64decode(assembly))):
        path.write_bytes(lzma.compress(content, preset=9 | lzma.PRESET_EXTREME))


if __name__ == "__main__":
    pack(Path(sys.argv[1]))
