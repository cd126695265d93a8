# SPDX-License-Identifier: Apache-2.0
"""Optimisation: Adam with its moments, its settings, and learning rates."""
