# SPDX-License-Identifier: Apache-2.0
"""Counter-based randomness: every draw is a function of the seed and of its purpose.

A run has no random state to save, so resuming is bit-exact.
"""

import hashlib

import torch


def derive_seed(seed: int, *labels: str | int) -> int:
    """Hash ``seed`` and ``labels`` (for example ``"samples", iteration``) to 63 bits."""
    text = "/".join(str(part) for part in (seed, *labels))
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def draw_labels(iteration: int, view_index: int) -> tuple[int, ...]:
    """Labels of draws for one view; those of a step's first view have the iteration only."""
    return (iteration,) if view_index == 0 else (iteration, view_index)


def generator(seed: int, *labels: str | int) -> torch.Generator:
    """Make a generator for one purpose, independent of all others.

    It is on the CPU: a generator on a GPU gives other numbers on another model.
    """
    return torch.Generator(device="cpu").manual_seed(derive_seed(seed, *labels))
