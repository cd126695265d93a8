# SPDX-License-Identifier: Apache-2.0
"""Looking at results and at running trainings: page in the browser, pictures, videos."""

import sugar_utils  # noqa: F401  before torch and pycolmap
