# SPDX-License-Identifier: Apache-2.0
"""The neighbour search is exact, ordered and indifferent to how points lie."""

import pytest
import torch
import warp as wp

from sugar_utils import neighbors as module
from sugar_utils.errors import UserError
from sugar_utils.neighbors import (
    mean_sq_distance_to_nearest,
    nearest_neighbors,
    nearest_neighbors_of,
)
from tests.support.golden import load_golden
from tests.support.neighbor_reference import nearest_neighbors_reference


@pytest.fixture
def rng() -> torch.Generator:
    return torch.Generator().manual_seed(7)


def assert_matches_brute_force(points: torch.Tensor, k: int) -> None:
    """Self first, then the others by (distance, index), to the last bit."""
    n = points.shape[0]
    every = nearest_neighbors_reference(points, points, n)
    is_self = every.indices == torch.arange(n, dtype=torch.int32)[:, None]
    order = torch.where(is_self, -1.0, every.sq_distances).sort(dim=1, stable=True).indices
    found = nearest_neighbors(points, k)
    assert found.indices.shape == (n, min(k, n))
    assert torch.equal(found.indices, every.indices.gather(1, order)[:, :k])
    assert torch.equal(found.sq_distances, every.sq_distances.gather(1, order)[:, :k])


@pytest.mark.parametrize("n", [1, 2, 15, 16, 17, 900])
@pytest.mark.parametrize("k", [1, 4, 16, 20])
def test_random_points_match_brute_force(n, k, rng):
    assert_matches_brute_force(torch.rand(n, 3, generator=rng), k)


def line(rng):
    return torch.rand(1200, 3, generator=rng) * torch.tensor([1.0, 0.0, 0.0])


def lattice(rng):
    return torch.randint(0, 6, (1200, 3), generator=rng).float()


def outliers(rng):
    points = torch.rand(1200, 3, generator=rng)
    points[5], points[6], points[7] = 1e6, -1e9, 1e30
    return points


def two_scales(rng):
    points = torch.rand(1200, 3, generator=rng)
    points[600:] = points[600:] * 1e-6 + torch.tensor([1000.0, 0.0, 0.0])
    return points


def thin_sheet(rng):
    return torch.randn(1200, 3, generator=rng) * torch.tensor([1.0, 1.0, 1e-5])


@pytest.mark.parametrize("shape", [line, lattice, outliers, two_scales, thin_sheet])
def test_awkward_arrangements_match_brute_force(shape, rng):
    assert_matches_brute_force(shape(rng), 16)


def test_identical_points_put_self_first_then_the_lowest_indices():
    found = nearest_neighbors(torch.ones(5000, 3), 4)
    assert torch.equal(found.indices[:, 0], torch.arange(5000, dtype=torch.int32))
    assert found.indices[4999].tolist() == [4999, 0, 1, 2]
    assert found.indices[1].tolist() == [1, 0, 2, 3]
    assert not found.sq_distances.any()


def test_a_whole_scene_in_one_cell_of_the_cube_is_still_cut_into_small_leaves(rng):
    points = torch.rand(2000, 3, generator=rng)
    points[0] = 1e12
    boxes = module._build_tree(points).boxes
    leaves = boxes[boxes.shape[0] // 2 :]
    sizes = (leaves[:, 3:] - leaves[:, :3]).amax(dim=1)
    assert sizes.median() < 0.5


@pytest.mark.parametrize("shape", [line, lattice, outliers, two_scales, thin_sheet])
def test_where_a_search_begins_changes_nothing_but_its_time(shape, rng, monkeypatch):
    points = shape(rng)
    queries = torch.cat([points[::3], 1.5 * points[::5], torch.rand(50, 3, generator=rng)])
    found = nearest_neighbors_of(queries, points, 7)
    expected = nearest_neighbors_reference(queries, points, 7)
    assert torch.equal(found.indices, expected.indices)
    assert torch.equal(found.sq_distances, expected.sq_distances)
    first = lambda tree, queries: torch.full((len(queries),), tree.first_leaf).int()  # noqa: E731
    monkeypatch.setattr(module._Tree, "leaves_near", first)
    again = nearest_neighbors_of(queries, points, 7)
    assert torch.equal(again.indices, found.indices)
    assert torch.equal(again.sq_distances, found.sq_distances)


def test_points_begin_in_their_own_leaf_or_beside_it(rng):
    points = torch.rand(5_000, 3, generator=rng)
    tree = module._build_tree(points)
    assert bool((tree.codes[1:] >= tree.codes[:-1]).all())
    own = tree.first_leaf + torch.arange(5_000) // module.LEAF_SIZE
    assert (tree.leaves_near(tree.points) - own).abs().max() <= 1


def test_every_tree_order_is_a_permutation(rng):
    for points in (outliers(rng), two_scales(rng), torch.zeros(100, 3)):
        order = module._tree_order(points)
        assert torch.equal(order.sort().values, torch.arange(points.shape[0]))


def test_k_beyond_the_number_of_points_is_clipped():
    assert nearest_neighbors(torch.rand(3, 3), 16).indices.shape == (3, 3)


def test_no_points_have_no_neighbours():
    found = nearest_neighbors(torch.empty(0, 3), 16)
    assert found.indices.shape == (0, 0)
    assert nearest_neighbors_of(torch.rand(5, 3), torch.empty(0, 3), 4).indices.shape == (5, 0)
    assert nearest_neighbors_of(torch.empty(0, 3), torch.rand(9, 3), 4).indices.shape == (0, 4)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_points_that_are_not_finite_are_counted_in_the_error(bad):
    points = torch.rand(10, 3)
    points[2, 1] = points[7, 0] = bad
    with pytest.raises(UserError, match="2 of 10 points"):
        nearest_neighbors(points, 4)


def test_arbitrary_queries_match_brute_force(rng):
    points = lattice(rng)
    queries = torch.cat([torch.rand(300, 3, generator=rng) * 8 - 1, points[:50]])
    found = nearest_neighbors_of(queries, points, 9)
    expected = nearest_neighbors_reference(queries, points, 9)
    assert torch.equal(found.indices, expected.indices)
    assert torch.equal(found.sq_distances, expected.sq_distances)


def test_batches_and_threads_change_nothing(rng):
    points = torch.randn(3000, 3, generator=rng)
    whole = nearest_neighbors(points, 16)
    threads = torch.get_num_threads()
    try:
        for n_threads, batch in ((1, 100_000), (2, 700), (3, 4000)):
            torch.set_num_threads(n_threads)
            found = nearest_neighbors(points, 16, query_batch=batch)
            assert torch.equal(found.indices, whole.indices)
            assert torch.equal(found.sq_distances, whole.sq_distances)
    finally:
        torch.set_num_threads(threads)


def test_mean_distance_to_nearest_of_a_square_is_known():
    square = torch.tensor([[0.0, 0, 0], [1, 0, 0], [0, 1, 0], [1, 1, 0]])
    torch.testing.assert_close(mean_sq_distance_to_nearest(square), torch.full((4,), 4 / 3))


def test_mean_distance_of_a_lonely_point_is_zero():
    assert mean_sq_distance_to_nearest(torch.rand(1, 3)).tolist() == [0.0]


def test_golden_neighbours_are_found():
    case = load_golden("case05a_sampling_fields_A")
    found = nearest_neighbors(torch.tensor(case["in_points"]), 16)
    assert torch.equal(found.indices.long(), torch.tensor(case["out_knn_idx"]))
    expected = torch.tensor(case["out_knn_dists"])
    torch.testing.assert_close(found.sq_distances, expected, rtol=1e-4, atol=1e-9)


@pytest.mark.parametrize("k", [1, 4, 16, 40])
def test_the_kernel_of_gpus_finds_the_same_bits(k, rng, monkeypatch):
    size = 10.0 ** torch.randint(-7, 0, (4000, 1), generator=rng)
    points = torch.randn(50, 3, generator=rng).repeat(80, 1)
    points += size * torch.randn(4000, 3, generator=rng)
    points[3000:3500], points[3500:] = points[:500], points[0]
    queries = torch.cat([points[::7], 2 * torch.randn(300, 3, generator=rng)])
    here = nearest_neighbors(points, k), nearest_neighbors_of(queries, points, k)
    plain = lambda tree: [tree.points, tree.rows, tree.boxes, tree.lowest]  # noqa: E731
    monkeypatch.setattr(module, "_in_eights", plain)
    monkeypatch.setattr(module, "_native_query_kernel", module._query_kernel)
    there = nearest_neighbors(points, k), nearest_neighbors_of(queries, points, k)
    for one, other in zip(here, there, strict=True):
        assert torch.equal(one.indices, other.indices)
        assert torch.equal(one.sq_distances, other.sq_distances)


def test_kernels_compile_for_cuda(tmp_path):
    for target in (module, module._query_kernel(16).module):
        wp.compile_aot_module(target, arch=75, module_dir=tmp_path, use_ptx=True)
    assert list(tmp_path.glob("*.ptx"))


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_finds_the_same_bits(rng):
    points = torch.randn(5000, 3, generator=rng)
    here, there = nearest_neighbors(points, 16), nearest_neighbors(points.cuda(), 16)
    assert torch.equal(here.indices, there.indices.cpu())
    assert torch.equal(here.sq_distances, there.sq_distances.cpu())
