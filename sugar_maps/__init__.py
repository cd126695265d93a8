# SPDX-License-Identifier: Apache-2.0
"""From the world of a capture to a map: control points, GPS, printed targets, scans."""

import sugar_utils  # noqa: F401  before torch and pycolmap
