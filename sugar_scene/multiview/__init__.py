# SPDX-License-Identifier: Apache-2.0
"""What several views say together about a surface: planes, reprojection, patches, neighbours."""

import sugar_utils  # noqa: F401  before torch and pycolmap
