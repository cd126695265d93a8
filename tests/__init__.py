# SPDX-License-Identifier: Apache-2.0
"""Tests, and what they share."""

import sugar_utils  # noqa: F401  before torch and pycolmap
