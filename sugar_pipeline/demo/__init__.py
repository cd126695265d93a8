# SPDX-License-Identifier: Apache-2.0
"""The scene that the program draws itself, and runs on."""
