# SPDX-License-Identifier: Apache-2.0
"""From photographs or a video to cameras: what ``convert.py`` does."""
