# SPDX-License-Identifier: Apache-2.0
"""Density, tangent planes and normals at points in space."""
