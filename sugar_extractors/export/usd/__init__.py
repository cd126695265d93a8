# SPDX-License-Identifier: Apache-2.0
"""USD files, through the optional package usd-core."""
