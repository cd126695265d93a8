# SPDX-License-Identifier: Apache-2.0
"""Hole filling of meshes: choice of holes, surfaces, and evidence of images."""
