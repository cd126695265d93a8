# SPDX-License-Identifier: Apache-2.0
"""Gaussians as tensors: their shapes, their colours, and how both move."""
