# SPDX-License-Identifier: Apache-2.0
"""The training engine: loop, checkpoints, guards, logging and evaluation, for every stage."""
