# SPDX-License-Identifier: Apache-2.0
"""Models that turn inside a page: Google's ``<model-viewer>`` and what connects it.

The component lies in ``web/`` as published (version 4.4.0, Apache-2.0, with parts under the BSD and
MIT licences that it names). It is written into the page, so that the page needs no network.
"""

from __future__ import annotations

import base64
from pathlib import Path

from sugar_utils.text import escape

_COMPONENT = Path(__file__).parent / "web" / "model-viewer-umd.min.js"

MODEL_STYLE = """
.model model-viewer { width: 100%; height: min(75vh, 36rem); background: var(--panel);
  border-radius: 8px; --poster-color: transparent }
.model button { font: inherit; font-size: .85rem; margin: .5rem .4rem .25rem 0; cursor: pointer;
  padding: .2rem .8rem; color: var(--ink); background: var(--panel); border-radius: 6px;
  border: 1px solid var(--rule) }
.model button[aria-pressed=true] { color: var(--paper); background: var(--link) }
@media print { .model { display: none } }
"""

# Wireframe is nothing that the component offers; where its scene is not found, nothing happens.
_CONNECTION = """
for (const figure of document.querySelectorAll("figure.model")) {
  const viewer = figure.querySelector("model-viewer");
  const text = atob(figure.querySelector("script").textContent.trim());
  const bytes = Uint8Array.from(text, c => c.charCodeAt(0));
  const buttons = [...figure.querySelectorAll("button")];
  const show = (lines) => {
    const key = Object.getOwnPropertySymbols(viewer).find(s => s.description === "scene");
    if (!key) return;
    viewer[key].traverse(node => {
      if (node.isMesh) for (const m of [node.material].flat()) m.wireframe = lines;
    });
    viewer[key].queueRender();
  };
  for (const button of buttons) button.addEventListener("click", async () => {
    for (const other of buttons) other.setAttribute("aria-pressed", other === button);
    viewer.variantName = button.dataset.show === "textured" ? "textured" : "clay";
    await viewer.updateComplete;
    setTimeout(() => show(button.dataset.show === "wireframe"), 60);
  });
  viewer.addEventListener("load", () => figure.setAttribute("data-shown", "yes"));
  viewer.src = URL.createObjectURL(new Blob([bytes], {type: "model/gltf-binary"}));
}
"""


def model_figure(glb: bytes, caption: str) -> str:
    """A figure with a model in it, to be turned with mouse or fingers.

    Args:
        glb: With the variants ``textured`` and ``clay``.
        caption: A line below it.
    """
    buttons = "".join(
        f'<button type="button" data-show="{show}" aria-pressed="{pressed}">{show}</button>'
        for show, pressed in (("textured", "true"), ("clay", "false"), ("wireframe", "false"))
    )
    content = base64.b64encode(glb).decode("ascii")
    return (
        '<figure class="model"><model-viewer camera-controls loading="eager" touch-action="pan-y" '
        f'interaction-prompt="none" alt="{escape(caption)}"></model-viewer>{buttons}'
        f"<figcaption>{escape(caption)}</figcaption>"
        f'<script type="text/plain">{content}</script></figure>'
    )


def model_scripts() -> str:
    """What a page with such figures ends with."""
    # Maps of the source are not carried along.
    component = _COMPONENT.read_text(encoding="utf-8").split("\n//# sourceMappingURL")[0]
    return f"<script>{component}</script><script>{_CONNECTION}</script>"
