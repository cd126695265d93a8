# SPDX-License-Identifier: Apache-2.0
"""Counter-based randomness: every draw is a function of the seed and of what it is for.

A run has no random state to save, which is what makes resuming bit-exact.
"""

import hashlib

import torch


def derive_seed(seed: int, *labels: str | int) -> int:
    """Hash ``seed`` and ``labels`` (for example ``"samples", iteration``) to 63 bits."""
    text = "/".join(str(part) for part in (seed, *labels))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def draw_labels(iteration: int, view_index: int) -> tuple[int, ...]:
    """Labels of what is drawn for one view: the first of a step has the iteration's alone."""
    return (iteration,) if view_index == 0 else (iteration, view_index)


def generator(seed: int, *labels: str | int) -> torch.Generator:
    """A fresh generator for one purpose, independent of all others.

    It is on the CPU: a generator on a GPU gives other numbers on another model.
    """
    return torch.Generator(device="cpu").manual_seed(derive_seed(seed, *labels))
