# SPDX-License-Identifier: Apache-2.0
"""Components of stages: features beside the model, one in each file; a stage's builder chooses."""
