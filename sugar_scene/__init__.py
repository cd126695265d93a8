# SPDX-License-Identifier: Apache-2.0
"""SuGaR's geometry: density fields, meshes, Gaussians bound to them, reprojection."""

import sugar_utils  # noqa: F401  before torch and pycolmap
