# SPDX-License-Identifier: Apache-2.0
"""All stages of a run together: from flags to settings, plan, run and report."""
