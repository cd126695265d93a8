# SPDX-License-Identifier: Apache-2.0
"""Durations of stages, and lengths of stages for runs that are to end in time."""
