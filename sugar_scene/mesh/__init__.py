# SPDX-License-Identifier: Apache-2.0
"""Triangle meshes: in memory, in files, seen by a camera."""
