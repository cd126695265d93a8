# SPDX-License-Identifier: Apache-2.0
"""Foretold memory against measured memory, and the plans that are made of it."""

from __future__ import annotations

import pytest

from benchmarks.memory import Setting, weigh_setting
from gaussian_splatting.optimizer_config import OptimizerConfig

SMALL = {"n": 20_000, "width": 320, "height": 240, "samples": 20_000, "sample_chunk": 20_000}


@pytest.mark.parametrize(
    "setting",
    [
        Setting("entropy", **SMALL),
        Setting("geometry", **SMALL, strips=3),
        Setting(
            "geometry",
            **{**SMALL, "sample_chunk": 5_000},
            full_res_normals=False,
            optimizer=OptimizerConfig("8bit", bfloat16=True),
        ),
        Setting("refine", **SMALL, strips=2),
    ],
    ids=lambda setting: setting.phase,
)
def test_foretold_peaks_are_within_a_tenth_of_measured_ones(setting):
    weight = weigh_setting(setting)
    assert weight.predicted == pytest.approx(weight.live.peak, rel=0.1)
    assert sum(weight.live.parts.values()) == weight.live.peak
