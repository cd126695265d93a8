# SPDX-License-Identifier: Apache-2.0
"""pytorch3d's neighbour search behind ours, proven on a stand-in with its interface."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch

from sugar_trainers.coarse_config import CoarseConfig
from sugar_trainers.coarse_stage import CoarseStage
from sugar_utils.errors import UserError
from sugar_utils.neighbor_backends import Pytorch3dNeighbors, choose_neighbor_search
from sugar_utils.neighbors import nearest_neighbors
from tests.support.tiny_scene import tiny_cloud

CPU = torch.device("cpu")


class Found(NamedTuple):
    """As pytorch3d returns it."""

    dists: torch.Tensor
    idx: torch.Tensor
    knn: torch.Tensor | None


class FakeOps:
    """``pytorch3d.ops.knn_points``: (1, P, 3) and (1, Q, 3) to (1, P, K), ties in any order."""

    def __init__(self, flip=False):
        self.flip, self.batches = flip, []

    def knn_points(self, p1, p2, lengths1=None, lengths2=None, norm=2, K=1, version=-1,
                   return_nn=False, return_sorted=True):  # fmt: skip
        self.batches.append(p1.shape[1])
        squares = ((p1[0][:, None] - p2[0][None]) ** 2).sum(dim=-1)
        if self.flip:
            # Equal distances from the last row down.
            found = squares.flip(1).sort(dim=1, stable=True)
            order = squares.shape[1] - 1 - found.indices
        else:
            found = squares.sort(dim=1, stable=True)
            order = found.indices
        return Found(found.values[None, :, :K], order[None, :, :K].long(), None)


def points(n=16, seed=0):
    return torch.rand(n, 3, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("flip", [False, True])
@pytest.mark.parametrize("k", [1, 16, 99])
def test_neighbours_are_those_of_the_built_in_search(k, flip):
    found = Pytorch3dNeighbors(FakeOps(flip))(points(), k)
    expected = nearest_neighbors(points(), k)
    assert torch.equal(found.indices, expected.indices)
    assert found.indices.dtype == torch.int32
    torch.testing.assert_close(found.sq_distances, expected.sq_distances)


@pytest.mark.parametrize("flip", [False, True])
@pytest.mark.parametrize("k", [1, 2, 4])
def test_a_point_comes_first_among_its_duplicates(flip, k):
    same = points(4).repeat(3, 1)
    found = Pytorch3dNeighbors(FakeOps(flip))(same, k)
    assert torch.equal(found.indices[:, 0], torch.arange(12, dtype=torch.int32))
    assert all(len(set(row)) == k for row in found.indices.tolist())
    assert bool((found.sq_distances[:, : min(k, 3)] == 0).all())


def test_queries_come_in_batches():
    ops = FakeOps()
    found = Pytorch3dNeighbors(ops)(points(60), 16, query_batch=25)
    assert ops.batches == [25, 25, 10]
    assert torch.equal(found.indices, nearest_neighbors(points(60)).indices)


def test_nothing_has_no_neighbours():
    found = Pytorch3dNeighbors(FakeOps())(torch.zeros(0, 3), 4)
    assert found.indices.shape == found.sq_distances.shape == (0, 0)


def test_coordinates_that_are_no_numbers_are_an_error():
    bad = points()
    bad[3, 1] = float("nan")
    with pytest.raises(UserError, match="NaN or infinite"):
        Pytorch3dNeighbors(FakeOps())(bad, 3)


@pytest.mark.parametrize("name", ["auto", "warp"])
def test_the_built_in_search_is_the_default(name):
    assert choose_neighbor_search(name, CPU) == (nearest_neighbors, "")


def test_pytorch3d_is_tested_before_it_is_used(monkeypatch):
    monkeypatch.setitem(sys.modules, "pytorch3d", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "pytorch3d.ops", FakeOps())
    search, reason = choose_neighbor_search("pytorch3d", CPU)
    assert isinstance(search, Pytorch3dNeighbors)
    assert "self-test passed" in reason


def wrong_distances(p1, p2, K):
    found = FakeOps().knn_points(p1, p2, K=K)
    return found._replace(dists=found.dists.sqrt())


def failing(p1, p2, K):
    raise RuntimeError("Not compiled with GPU\nsupport")


@pytest.mark.parametrize(
    ("function", "words"),
    [(wrong_distances, "differ from exact ones"), (failing, "Not compiled with GPU support")],
)
def test_a_wrong_pytorch3d_is_refused(function, words, monkeypatch):
    monkeypatch.setitem(sys.modules, "pytorch3d", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "pytorch3d.ops", SimpleNamespace(knn_points=function))
    with pytest.raises(UserError, match=words) as caught:
        choose_neighbor_search("pytorch3d", CPU)
    assert "\n" not in str(caught.value)


def test_a_missing_pytorch3d_is_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "pytorch3d", None)
    with pytest.raises(UserError, match="--neighbors pytorch3d: it cannot be imported"):
        choose_neighbor_search("pytorch3d", CPU)


def test_the_coarse_stage_asks_the_search_that_was_chosen():
    ops = FakeOps()
    config = CoarseConfig("density", sdf_samples=100)
    stage = CoarseStage(tiny_cloud(), config, 3.0, print, neighbors=Pytorch3dNeighbors(ops))
    stage.begin(9_100)
    assert ops.batches == [200]
    assert stage.neighbors.shape == (200, config.n_neighbors)
