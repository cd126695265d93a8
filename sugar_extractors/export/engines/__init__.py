# SPDX-License-Identifier: Apache-2.0
"""Game engines: meshes to collide with, and levels of detail."""
