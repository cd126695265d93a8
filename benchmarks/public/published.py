# SPDX-License-Identifier: Apache-2.0
"""Rows of others, as printed in their papers; where a paper quotes another method, it is named.

Times are those of the papers, of training and on different GPUs: they cannot be compared closely.
"""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.public.layouts import (
    DTU_SCENES,
    INDOOR_SCENES,
    OUTDOOR_SCENES,
    TANKS_SCENES,
)

ALL_SCENES = "all"  # key of the mean that a paper prints
_3DGS = "3DGS, SIGGRAPH 2023"
_2DGS = "2DGS, arXiv 2403.17888"
_PGSR = "PGSR, arXiv 2406.06521"
_MILO = "MILo, arXiv 2506.24096"
_GGGS = "GGGS, arXiv 2601.17835"
_AMBISUR = "AmbiSuR, arXiv 2605.12494"
_GSPLAT = "gsplat, documentation of its evaluation"
_PAPER_360 = (*OUTDOOR_SCENES, *INDOOR_SCENES)
_GSPLAT_360 = ("bicycle", "bonsai", "counter", "garden", "kitchen", "room", "stump")
_PAPER_SYNTHETIC = ("mic", "chair", "ship", "materials", "lego", "drums", "ficus", "hotdog")


@dataclass(frozen=True)
class PublishedRow:
    """One row of a table of a paper."""

    method: str
    source: str  # the paper or page, and the number of the table
    values: dict[str, float]  # by scene, and the printed mean as ``ALL_SCENES``
    time: str = ""  # of training, with the GPU where it is named


def _values(scenes: tuple[str, ...], text: str) -> dict[str, float]:
    """Return the numbers of a row by scene; one more is the printed mean."""
    numbers = [float(word) for word in text.split()]
    if len(numbers) not in (len(scenes), len(scenes) + 1):
        raise ValueError(f"{len(numbers)} numbers for {len(scenes)} scenes: {text}")
    return dict(zip((*scenes, ALL_SCENES), numbers, strict=False))


def _dtu(method: str, source: str, time: str, text: str) -> PublishedRow:
    return PublishedRow(method, source, _values(DTU_SCENES, text), time)


def _tanks(method: str, source: str, time: str, text: str) -> PublishedRow:
    return PublishedRow(method, source, _values(TANKS_SCENES, text), time)


_DTU_ROWS = (
    _dtu(
        "3DGS",
        f"{_2DGS}, table 1",
        "11.2 min",
        "2.14 1.53 2.08 1.68 3.49 2.21 1.43 2.07 2.22 1.75 1.79 2.55 1.53 1.52 1.50 1.96",
    ),
    _dtu(
        "SuGaR",
        f"{_2DGS}, table 1",
        "1 h",
        "1.47 1.33 1.13 0.61 2.25 1.71 1.15 1.63 1.62 1.07 0.79 2.45 0.98 0.88 0.79 1.33",
    ),
    _dtu(
        "2DGS",
        f"{_2DGS}, table 1",
        "10.9 min",
        "0.48 0.91 0.39 0.39 1.01 0.83 0.81 1.36 1.27 0.76 0.70 1.40 0.40 0.76 0.52 0.80",
    ),
    _dtu(
        "GOF",
        f"quoted by {_MILO}, table 3",
        "55 min, RTX 4090",
        "0.50 0.82 0.37 0.37 1.12 0.74 0.73 1.18 1.29 0.68 0.77 0.90 0.42 0.66 0.49 0.74",
    ),
    _dtu(
        "PGSR, half size",
        f"{_PGSR}, table II",
        "0.6 h, RTX 4090",
        "0.34 0.58 0.29 0.29 0.78 0.58 0.54 1.01 0.73 0.51 0.49 0.69 0.31 0.37 0.38 0.53",
    ),
    _dtu(
        "PGSR",
        f"{_PGSR}, table II",
        "1.0 h, RTX 4090",
        "0.31 0.52 0.27 0.27 0.76 0.54 0.49 0.98 0.69 0.49 0.46 0.56 0.28 0.35 0.36 0.49",
    ),
    _dtu(
        "MILo",
        f"{_MILO}, table 3",
        "25 min, RTX 4090",
        "0.43 0.74 0.34 0.37 0.80 0.74 0.70 1.21 1.22 0.66 0.62 0.80 0.37 0.76 0.48 0.68",
    ),
    _dtu(
        "GGGS, 20k",
        f"{_GGGS}, table 1",
        "15.0 min",
        "0.38 0.50 0.27 0.31 0.80 0.43 0.42 1.04 0.64 0.52 0.31 0.56 0.30 0.31 0.33 0.47",
    ),
    _dtu(
        "GGGS, 30k",
        f"{_GGGS}, table 1",
        "25.3 min",
        "0.37 0.50 0.27 0.31 0.81 0.43 0.42 1.05 0.64 0.52 0.32 0.58 0.30 0.31 0.33 0.48",
    ),
    PublishedRow("AmbiSuR", _AMBISUR, {ALL_SCENES: 0.46}, "0.6 h"),
)
_TANKS_ROWS = (
    _tanks("3DGS", f"{_2DGS}, table 2", "14.3 min", "0.13 0.08 0.09 0.04 0.01 0.19 0.09"),
    _tanks("SuGaR", f"{_2DGS}, table 2", "1 h", "0.14 0.16 0.08 0.33 0.15 0.26 0.19"),
    _tanks("2DGS", f"{_2DGS}, table 2", "15.5 min", "0.41 0.23 0.16 0.51 0.17 0.45 0.32"),
    _tanks("GOF", f"quoted by {_GGGS}, table 2", "71.6 min", "0.51 0.41 0.28 0.68 0.28 0.59 0.46"),
    _tanks("PGSR", f"{_PGSR}, table III", "1.2 h, RTX 4090", "0.66 0.41 0.21 0.80 0.29 0.60 0.50"),
    _tanks("PGSR", f"quoted by {_GGGS}, table 2", "42.9 min", "0.66 0.44 0.20 0.81 0.33 0.66 0.52"),
    PublishedRow("MILo", f"{_MILO}, table 5", {ALL_SCENES: 0.49}, "50 min, RTX 4090"),
    _tanks("GGGS", f"{_GGGS}, table 2", "32.1 min", "0.70 0.56 0.38 0.81 0.42 0.70 0.60"),
    PublishedRow("AmbiSuR", _AMBISUR, {ALL_SCENES: 0.589}),
)


def _360(paper: str, gsplat: str) -> tuple[PublishedRow, ...]:
    """Rows of Mip-NeRF 360; without numbers of gsplat one row."""
    rows = [PublishedRow("3DGS", f"{_3DGS}, appendix", _values(_PAPER_360, paper))]
    if gsplat:
        rows.append(
            PublishedRow("gsplat", _GSPLAT, _values(_GSPLAT_360, gsplat), "24 to 50 min, TITAN RTX")
        )
    return tuple(rows)


PUBLISHED: dict[tuple[str, str], tuple[PublishedRow, ...]] = {
    ("dtu", "mean"): _DTU_ROWS,
    ("tanks", "f_score"): _TANKS_ROWS,
    ("mipnerf360", "psnr"): _360(
        "25.246 21.520 27.410 26.550 22.490 30.632 28.700 30.317 31.980",
        "25.22 32.06 29.02 27.32 31.16 31.36 26.53",
    ),
    ("mipnerf360", "ssim"): _360(
        "0.771 0.605 0.868 0.775 0.638 0.914 0.905 0.922 0.938",
        "0.764 0.941 0.907 0.865 0.926 0.918 0.768",
    ),
    # The LPIPS of gsplat's page is another one.
    ("mipnerf360", "lpips"): _360("0.205 0.336 0.103 0.210 0.317 0.220 0.204 0.129 0.205", ""),
    ("synthetic", "psnr"): (
        PublishedRow(
            "3DGS",
            f"{_3DGS}, table 2",
            _values(_PAPER_SYNTHETIC, "35.36 35.83 30.80 30.00 35.78 26.15 34.87 37.72 33.32"),
            "7.1 min",
        ),
    ),
}
"""Rows by benchmark and figure."""
