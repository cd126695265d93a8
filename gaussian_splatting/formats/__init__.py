# SPDX-License-Identifier: Apache-2.0
"""Formats of Gaussian files: PLY, SPZ, SOG, splat."""
