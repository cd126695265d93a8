# SPDX-License-Identifier: Apache-2.0
"""Depth maps and normal maps of images."""
