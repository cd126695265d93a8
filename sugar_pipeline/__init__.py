# SPDX-License-Identifier: Apache-2.0
"""All stages together: pipelines, the demo, reports, metrics."""

import sugar_utils  # noqa: F401  before torch and pycolmap
