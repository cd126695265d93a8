# SPDX-License-Identifier: Apache-2.0
"""Blender extension: scans of the SuGaR trainer are made, imported, edited and exported.

``plain/`` knows nothing about Blender and is tested without it; ``scene/`` makes Blender's objects;
``operators/`` are what the user calls. Modules that need Blender are imported when it registers the
extension, so that ``plain/`` can be imported anywhere.
"""


def register() -> None:
    """Register preferences, operators and the panel; called by Blender."""
    from . import registration

    registration.register()


def unregister() -> None:
    """Undo :func:`register`; called by Blender."""
    from . import registration

    registration.unregister()
