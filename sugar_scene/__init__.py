# SPDX-License-Identifier: Apache-2.0
"""What SuGaR adds to Gaussians: neighbours, fields, sampling."""

import sugar_utils  # noqa: F401  before torch and pycolmap
