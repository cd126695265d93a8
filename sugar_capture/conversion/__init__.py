# SPDX-License-Identifier: Apache-2.0
"""From photographs or a video to a scene with cameras, and the page about it."""
