# SPDX-License-Identifier: Apache-2.0
"""The vanilla 3DGS stage: what it optimises, its run and its flags."""
