# SPDX-License-Identifier: Apache-2.0
"""From the world of a capture to a map: control points, GPS, and the similarity between both."""
