# SPDX-License-Identifier: Apache-2.0
"""From the images of a capture to models with their poses, by a list of steps."""
