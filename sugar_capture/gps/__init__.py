# SPDX-License-Identifier: Apache-2.0
"""Positions of photographs and of frames of videos, by satellite."""
