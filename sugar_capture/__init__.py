# SPDX-License-Identifier: Apache-2.0
"""From photographs or videos to camera poses; cameras of other programs."""

import sugar_utils  # noqa: F401  before torch and pycolmap
