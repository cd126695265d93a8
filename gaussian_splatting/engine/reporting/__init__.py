# SPDX-License-Identifier: Apache-2.0
"""What a run tells: progress, curves, pictures, figures and a page."""
