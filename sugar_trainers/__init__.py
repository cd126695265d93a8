# SPDX-License-Identifier: Apache-2.0
"""The SuGaR stages: loss terms, their schedules, and files."""

import sugar_utils  # noqa: F401  before torch and pycolmap
