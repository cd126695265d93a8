# SPDX-License-Identifier: Apache-2.0
"""The controls of the page for pictures that the Warp renderer draws."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from gaussian_splatting.data.cameras import Camera
from sugar_viewer import page_server
from sugar_viewer.rendered_pictures import (
    LAYOUTS,
    PICTURES,
    Arrangement,
    PictureChoice,
    RenderedPictures,
)

if TYPE_CHECKING:
    import viser


class RenderPanel:
    """Controls that choose what the Warp renderer draws.

    ``arrangement`` is the choice, None while the browser draws by itself.
    """

    def __init__(
        self,
        server: viser.ViserServer,
        pictures: RenderedPictures,
        cameras: Sequence[Camera],
        changed: Callable[[], None],
    ) -> None:
        self.arrangement: Arrangement | None = None
        self._changed = changed
        self._pictures = pictures
        titles = tuple(pictures.models)
        if not titles:
            return
        gui = server.gui
        kinds = PICTURES if cameras else PICTURES[:-2]
        with gui.add_folder("Rendered by SuGaR (exact)"):
            self._on = gui.add_checkbox(
                "On",
                False,
                hint="as the results are measured: view-dependent colours, depth, errors",
            )
            self._layout = gui.add_dropdown("Layout", LAYOUTS)
            self._left_title = gui.add_dropdown("Result", titles, initial_value=titles[-1])
            self._left_kind = gui.add_dropdown("Picture", kinds)
            self._right_title = gui.add_dropdown("Beside it", titles, initial_value=titles[0])
            self._right_kind = gui.add_dropdown("Picture ", kinds)
            self._split = gui.add_slider("Slider", 0.0, 1.0, 0.01, 0.5)
            self._words = gui.add_markdown("")
        for control in (
            self._on,
            self._layout,
            self._left_title,
            self._left_kind,
            self._right_title,
            self._right_kind,
            self._split,
        ):
            control.on_update(lambda _: self._read())
        self._read(silent=True)

    def tell(self, photograph: str) -> None:
        """Name the image whose camera a picture is rendered from."""
        text = f"from the place of `{photograph}`" if photograph else ""
        if self._words.content != text:
            self._words.content = text

    def _read(self, silent: bool = False) -> None:
        """Update ``arrangement`` from the controls, and report it unless ``silent``."""
        layout = page_server.selected_option(self._layout)
        for control in (self._right_title, self._right_kind):
            control.visible = layout != LAYOUTS[0]
        self._split.visible = layout == LAYOUTS[2]
        selected = page_server.selected_option
        first = self._choice(selected(self._left_title), selected(self._left_kind))
        second = self._choice(selected(self._right_title), selected(self._right_kind))
        split = self._split.value
        if not 0 <= split <= 1:
            split = 0.5
        self.arrangement = None
        if self._on.value:
            self.arrangement = Arrangement(first, second, layout, split)
        if not silent:
            self._changed()

    def _choice(self, model: str, picture: str) -> PictureChoice:
        """Return a choice of two controls; Gaussians have no clay, their colours are shown."""
        choice = PictureChoice(model, picture)
        available = self._pictures.available(choice.model)
        if choice.picture in available:
            return choice
        return replace(choice, picture=available[0])
