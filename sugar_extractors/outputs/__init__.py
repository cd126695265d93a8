# SPDX-License-Identifier: Apache-2.0
"""The folder of results of a run, and pictures of meshes."""
