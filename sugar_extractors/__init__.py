# SPDX-License-Identifier: Apache-2.0
"""From Gaussians to meshes: level sets, Poisson reconstruction, TSDF fusion."""

import sugar_utils  # noqa: F401  before torch and pycolmap
