# SPDX-License-Identifier: Apache-2.0
"""What is learned or done beside the model: one component a file; a stage's builder chooses."""
