# SPDX-License-Identifier: Apache-2.0
"""The SuGaR stages: which loss terms act when, and what is written."""

import sugar_utils  # noqa: F401  before torch and pycolmap
