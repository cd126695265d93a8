# SPDX-License-Identifier: Apache-2.0
"""Disturbances that photographs of strangers have: tone curves, casts, shadows, things in front.

All are drawn from a generator, so that a seed gives the same photographs everywhere.
"""

from __future__ import annotations

import numpy as np
from scipy.ndimage import gaussian_filter, zoom

GAMMA = 0.2  # standard deviation of the logarithm of a tone curve's exponent
CONTRAST = 0.3  # largest share of an S curve that is mixed into a tone curve, either way
CAST = 0.1  # standard deviation of the logarithms of the gains of the colour channels
GAIN = 0.15  # the same of the gain that all channels share
SHADE = (0.4, 0.65)  # range of the share of light in a shadow
SHADOW_EDGE = 0.015  # width of the penumbra, in image diagonals
HEIGHT = (0.35, 0.7)  # range of the height of a figure, in image heights


def toned(pixels: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Change the tone curve and the colour cast of a photograph. (H, W, 3) float in [0, 1]"""
    exponent = np.exp(rng.normal(0, GAMMA))
    share = rng.uniform(-CONTRAST, CONTRAST)
    gains = np.exp(rng.normal(0, CAST, 3) + rng.normal(0, GAIN))
    curved = pixels**exponent
    smoothstep = curved * curved * (3 - 2 * curved)
    curved = curved + share * (smoothstep - curved)
    return np.clip(curved * gains, 0, 1)


def shaded(pixels: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Let a shadow fall over a part of a photograph. (H, W, 3) float in [0, 1]

    Returns:
        The photograph, and where at least half of the shadow is, (H, W) bool.
    """
    height, width = pixels.shape[:2]
    rows, columns = np.mgrid[:height, :width]
    angle = rng.uniform(0, np.pi)
    across = (columns / width - 0.5) * np.cos(angle) + (rows / height - 0.5) * np.sin(angle)
    middle = rng.uniform(-0.25, 0.25)
    half = rng.uniform(0.1, 0.2)
    is_dark = (np.abs(across - middle) < half).astype(float)
    soft = gaussian_filter(is_dark, SHADOW_EDGE * np.hypot(height, width))
    light = 1 - soft * (1 - rng.uniform(*SHADE))
    return pixels * light[..., None], soft >= 0.5


def figure(shape: tuple[int, int], rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Draw a standing person in the clothes of the day, at a place in an image.

    Returns:
        Colours, (H, W, 3) float in [0, 1], and where the figure is, (H, W) bool.
    """
    height, width = shape
    tall = rng.uniform(*HEIGHT) * height
    top = rng.uniform(0.05, 0.95) * height - 0.4 * tall
    middle = rng.uniform(0.1, 0.9) * width
    rows, columns = np.mgrid[:height, :width]
    down = (rows + 0.5 - top) / tall
    side = (columns + 0.5 - middle) / tall
    is_head = ((down - 0.08) / 0.08) ** 2 + (side / 0.06) ** 2 < 1
    is_torso = (np.abs(down - 0.36) < 0.2) & (np.abs(side) < 0.13 - 0.05 * (down - 0.16))
    stride = rng.uniform(0.02, 0.1)
    spread = stride * (down - 0.55).clip(0) / 0.45 + 0.05
    is_leg = (down > 0.55) & (down < 1) & (np.abs(np.abs(side) - spread) < 0.045)
    skin, top_color, trousers = rng.uniform(0.05, 0.95, (3, 3))
    cells = rng.uniform(-1, 1, (9, 5, 3))
    pattern = zoom(cells, (height / 9, width / 5, 1), order=1, grid_mode=True, mode="nearest")
    colors = np.where(is_torso[..., None], top_color + 0.25 * pattern[:height, :width], trousers)
    colors = np.where(is_head[..., None], skin, colors)
    return np.clip(colors, 0, 1), is_head | is_torso | is_leg


def occluded(pixels: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Put one or two persons in front of a photograph. (H, W, 3) float in [0, 1]

    Returns:
        The photograph, and where the persons are, (H, W) bool.
    """
    covered = np.zeros(pixels.shape[:2], bool)
    for _ in range(rng.integers(1, 3)):
        colors, is_figure = figure(pixels.shape[:2], rng)
        pixels = np.where(is_figure[..., None], colors, pixels)
        covered |= is_figure
    return pixels, covered
