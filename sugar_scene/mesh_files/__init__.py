# SPDX-License-Identifier: Apache-2.0
"""Textured meshes as files: OBJ with its materials, glTF."""
