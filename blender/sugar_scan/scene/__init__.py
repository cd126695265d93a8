# SPDX-License-Identifier: Apache-2.0
"""Blender's objects of a scan: its mesh, its cameras, its Gaussians."""
