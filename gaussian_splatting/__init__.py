# SPDX-License-Identifier: Apache-2.0
"""3D Gaussian splatting by itself: scenes, rasterizer, training engine, vanilla trainer."""

import sugar_utils  # noqa: F401  before torch and pycolmap
