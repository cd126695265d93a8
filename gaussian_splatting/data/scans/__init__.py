# SPDX-License-Identifier: Apache-2.0
"""Point clouds of laser scanners: read, thinned, brought to the world of a scene, seen as depth."""
