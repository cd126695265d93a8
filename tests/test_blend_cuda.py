# SPDX-License-Identifier: Apache-2.0
"""The kernels of GPUs, run as fibers on the CPU, against native code and the float64 reference."""

from __future__ import annotations

import pytest
import torch
import warp as wp

from gaussian_splatting.losses import photometric_cuda
from gaussian_splatting.losses.color_loss import CountedRows
from gaussian_splatting.losses.photometric import FusedPhotometric, color_terms
from gaussian_splatting.losses.photometric_cuda import RUN
from gaussian_splatting.losses.ssim_reference import ssim_map_reference
from gaussian_splatting.rasterization import (
    Rows,
    SplatGradients,
    backpropagate_rows,
    blend_rows,
    build_tile_lists,
    gradient_sums_cuda,
    project,
    rasterizers,
)
from gaussian_splatting.rasterization import projection as projection_module
from gaussian_splatting.rasterization.tile_coverage import count_tiles
from sugar_utils.errors import UserError
from sugar_utils.warp_launch import as_array, launch, launch_blocks
from tests.support.random_scenes import look_at, random_gaussians
from tests.support.reference_rasterizer import rasterize_reference


def projected(n, seed=1, *, width=70, height=50, change=None, **channels):
    gaussians = random_gaussians(n, seed, torch.float32)
    if change is not None:
        change(gaussians)
    camera = look_at((2.5, 1.2, 0.3), width=width, height=height)
    return project(gaussians, camera, **(channels or {"depth": True, "normal": True}))


def random_inputs(projection, rows, seed=0):
    g = torch.Generator().manual_seed(seed)
    shape = (rows.stop - rows.start, projection.camera.width)
    n_channels = projection.layout.total
    return (
        torch.rand(n_channels, generator=g),
        torch.randn(*shape, n_channels, generator=g),
        torch.randn(shape, generator=g),
    )


def blend_and_return(projection, rows, inputs, blocks, front_transmittance=0.0):
    """Blended rows, and the gradients of splats for random gradients of the pixels."""
    background, d_pixels, d_transmittance = inputs
    tiles = build_tile_lists(projection, blocks=blocks)
    blended = blend_rows(
        projection.splats,
        tiles,
        background,
        rows,
        blocks=blocks,
        front_transmittance=front_transmittance,
    )
    gradients = SplatGradients.zeros(projection)
    backpropagate_rows(
        projection.splats,
        tiles,
        blended,
        d_pixels,
        d_transmittance,
        gradients,
        blocks=blocks,
    )
    return blended, gradients


def assert_equal_but_for_rounding(found, expected, tolerance=5e-6):
    columns = expected.detach().double().flatten(0, -2)
    scale = columns.abs().amax(dim=0).clamp_min(1e-9) if columns.shape[0] else 1.0
    difference = (found.detach().double().flatten(0, -2) - columns).abs() / scale
    assert not difference.numel() or float(difference.max()) < tolerance


def assert_blocks_agree_with_native_code(projection, rows=None, front=0.0):
    rows = rows or Rows(0, projection.camera.height)
    inputs = random_inputs(projection, rows)
    found, found_gradients = blend_and_return(projection, rows, inputs, True, front)
    expected, expected_gradients = blend_and_return(projection, rows, inputs, False, front)
    assert torch.equal(found.last, expected.last)
    assert_equal_but_for_rounding(found.pixels, expected.pixels)
    assert_equal_but_for_rounding(found.transmittance, expected.transmittance)
    assert_equal_but_for_rounding(found_gradients.splats, expected_gradients.splats)
    assert_equal_but_for_rounding(found_gradients.means2d, expected_gradients.means2d)


def cover_everything(gaussians):
    gaussians.scales[:40] = 5.0
    gaussians.means[:40] *= 0.1


def end_at_two_and_a_half_deviations(gaussians):
    gaussians.scales[:40] = 1.0
    gaussians.cutoff_deviations = 2.5


def make_opaque(gaussians):
    gaussians.opacities[:] = 0.97
    gaussians.scales[:] = 0.6


@pytest.mark.parametrize(
    ("n", "width", "height", "change"),
    [
        (250, 70, 50, None),
        (900, 33, 17, None),
        (1200, 16, 16, None),
        (40, 1, 1, None),
        (120, 7, 40, cover_everything),
        (200, 40, 20, make_opaque),
        (250, 70, 50, end_at_two_and_a_half_deviations),
        (0, 37, 21, None),
        (5, 32, 16, lambda g: g.means.add_(100.0)),
    ],
    ids=[
        "any",
        "long lists",
        "one tile",
        "one pixel",
        "covers everything",
        "ends inside a batch",
        "cutoff",
        "no gaussians",
        "no pairs",
    ],
)
def test_blocks_agree_with_native_code(n, width, height, change):
    projection = projected(n, width=width, height=height, change=change)
    if n == 1200:
        assert int(projection.tile_counts.sum()) > 256
    assert_blocks_agree_with_native_code(projection)


@pytest.mark.parametrize("front", [0.2, 0.5])
def test_what_blends_the_front_alone_agrees_with_native_code(front):
    projection = projected(900, width=40, height=30)
    assert_blocks_agree_with_native_code(projection, front=front)
    assert_blocks_agree_with_native_code(projection, Rows(5, 27), front=front)


@pytest.mark.parametrize(
    "n_features", [1, 11, *(pytest.param(n, marks=pytest.mark.slow) for n in (3, 5, 8))]
)
def test_any_number_of_channels_agrees_with_native_code(n_features):
    """Rows that are whole multiples of 16 bytes and that are not; more sums than one exchange."""
    features = torch.rand(120, n_features, generator=torch.Generator().manual_seed(0))
    projection = projected(120, width=40, height=30, rgb=False, features=features)
    assert_blocks_agree_with_native_code(projection)


def fill_the_screen(gaussians):
    gaussians.means[:20] *= 0.1
    gaussians.scales[:20] = 300.0
    gaussians.opacities[:20] = 0.05


def test_splats_that_fill_the_screen_agree_with_native_code_and_between_strips():
    projection = projected(300, 2, width=128, height=96, change=fill_the_screen)
    assert bool((projection.tile_counts[:20] == 48).all())
    lists = [build_tile_lists(projection, blocks=blocks).ids for blocks in (True, False)]
    assert torch.equal(*lists)
    assert_blocks_agree_with_native_code(projection)
    assert_blocks_agree_with_native_code(projection, Rows(20, 70))


def test_sums_of_large_splats_do_not_depend_on_how_many_others_there_are():
    def add_none_in_view(gaussians):
        fill_the_screen(gaussians)
        gaussians.means[300:] = 100.0

    results = []
    for n in (300, 437):
        projection = projected(300, 2, width=128, height=96, change=fill_the_screen)
        if n > 300:
            others = projected(n, 2, width=128, height=96, change=add_none_in_view)
            for name in ("splats", "means2d", "depths", "tile_rects", "tile_counts", "radii"):
                mine = getattr(projection, name).detach()
                whole = torch.cat([mine, getattr(others, name).detach()[300:]])
                setattr(projection, name, whole)
        inputs = random_inputs(projection, Rows(0, 96))
        gradients = blend_and_return(projection, Rows(0, 96), inputs, blocks=True)[1]
        results.append([gradients.splats[:300], gradients.means2d[:300]])
    assert float(results[0][0][:20].abs().max()) > 0
    for found, expected in zip(*results, strict=True):
        assert torch.equal(found, expected)


def test_sums_do_not_depend_on_how_many_splats_a_warp_takes(monkeypatch):
    projection = projected(300, 2, width=128, height=96, change=fill_the_screen)
    rows = Rows(20, 70)
    inputs = random_inputs(projection, rows)
    results = []
    for n_splats in (2, 5, 32):
        monkeypatch.setattr(gradient_sums_cuda, "splats_of_a_warp", lambda _, n=n_splats: n)
        gradients = blend_and_return(projection, rows, inputs, blocks=True)[1]
        results.append([gradients.splats, gradients.means2d])
    assert float(results[0][0][20:].abs().max()) > 0
    for found in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found, results[0], strict=True))


@pytest.mark.parametrize(
    ("n_splats", "expected"), [(1, 2), (12_000, 2), (100_000, 12), (262_144, 32), (10**7, 32)]
)
def test_warps_take_few_splats_where_there_are_few(n_splats, expected):
    assert gradient_sums_cuda.splats_of_a_warp(n_splats) == expected


@pytest.mark.parametrize("rows", [Rows(0, 1), Rows(13, 37), Rows(16, 32), Rows(49, 50)])
def test_strips_that_end_inside_tiles_agree_with_native_code(rows):
    assert_blocks_agree_with_native_code(projected(250), rows)


def test_strips_add_up_to_the_image():
    projection = projected(250)
    whole = Rows(0, 50)
    background, d_pixels, d_transmittance = random_inputs(projection, whole)
    blended, expected = blend_and_return(
        projection, whole, (background, d_pixels, d_transmittance), blocks=True
    )
    tiles = build_tile_lists(projection, blocks=True)
    found, again = SplatGradients.zeros(projection), []
    for rows in (Rows(0, 10), Rows(10, 33), Rows(33, 50)):
        strip = blend_rows(projection.splats, tiles, background, rows, blocks=True)
        again.append(strip.pixels)
        backpropagate_rows(
            projection.splats,
            tiles,
            strip,
            d_pixels[rows.start : rows.stop],
            d_transmittance[rows.start : rows.stop],
            found,
            blocks=True,
        )
    assert torch.equal(torch.cat(again), blended.pixels)
    assert_equal_but_for_rounding(found.splats, expected.splats)
    assert_equal_but_for_rounding(found.means2d, expected.means2d)


def test_every_repetition_gives_the_same_bits():
    projection = projected(250)
    rows = Rows(0, 50)
    results = [
        blend_and_return(projection, rows, random_inputs(projection, rows), blocks=True)
        for _ in range(2)
    ]
    assert torch.equal(results[0][0].pixels, results[1][0].pixels)
    assert torch.equal(results[0][1].splats, results[1][1].splats)


def test_values_and_gradients_match_the_dense_float64_reference():
    gaussians, camera = random_gaussians(200, 2), look_at((2.5, 1.2, 0.3), width=45, height=35)
    color = torch.tensor([0.2, 0.5, 0.9])
    g = torch.Generator().manual_seed(0)
    weights, feature_weights = (torch.randn(35, 45, n, generator=g) for n in (3, 3))
    features = torch.randn(200, 3, generator=g)

    exact = gaussians.as_leaves()
    expected = rasterize_reference(exact, camera, color.double(), features=features.double())
    loss = (expected.image * weights).sum() + (expected.features * feature_weights).sum()
    (loss + expected.alpha.sum()).backward()

    leaves = random_gaussians(200, 2, torch.float32).as_leaves()
    projection = project(leaves, camera, features=features)
    background = torch.cat([color, torch.zeros(3)])
    d_pixels = torch.cat([weights, feature_weights], dim=-1)
    blended, gradients = blend_and_return(
        projection, Rows(0, 35), (background, d_pixels, -torch.ones(35, 45)), blocks=True
    )
    torch.autograd.backward(
        [projection.means2d, projection.splats], [gradients.means2d, gradients.splats]
    )
    images = torch.cat([expected.image, expected.features], dim=-1)
    assert_equal_but_for_rounding(blended.pixels, images, 1e-5)
    assert_equal_but_for_rounding(1 - blended.transmittance, expected.alpha, 1e-5)
    for found, reference in zip(leaves.tensors(), exact.tensors(), strict=True):
        scale = reference.grad.abs().max()
        assert float((found.grad - reference.grad).abs().max() / scale) < 2e-5


@pytest.mark.parametrize(
    ("n", "change"), [(0, None), (1, None), (700, None), (700, end_at_two_and_a_half_deviations)]
)
def test_lists_are_those_of_native_code(n, change):
    projection = projected(n, width=70, height=50, change=change)
    found, expected = (build_tile_lists(projection, blocks=blocks) for blocks in (True, False))
    for name in ("offsets", "ids", "places", "counts"):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name
    reached = expected.counts > 0
    assert torch.equal(found.first_intersections[reached], expected.first_intersections[reached])


@pytest.mark.parametrize("change", [None, end_at_two_and_a_half_deviations])
def test_one_launch_projects_and_counts_as_two_do(change, monkeypatch):
    expected = projected(700, change=change)
    monkeypatch.setattr(projection_module, "counts_while_projecting", lambda device: True)
    found = projected(700, change=change)
    # Compiled with other rounding, so nearly the same splats; their tiles are counted exactly.
    assert torch.allclose(found.splats, expected.splats, rtol=1e-4, atol=1e-4)
    counts = torch.empty_like(found.tile_counts)
    inputs = [found.splats, as_array(found.tile_rects, wp.vec4i), counts]
    launch(count_tiles, 700, inputs, device=counts.device)
    assert found.tile_counts.sum() > 700
    assert torch.equal(found.tile_counts, counts)


@pytest.mark.parametrize("blocks", [True, False])
def test_lists_are_sorted_by_tile_then_depth_then_index(blocks):
    # 300 x 200 tiles: tile numbers times the bits of a depth need more than 31 bits.
    projection = projected(300, width=4800, height=3200)
    projection.depths[::3] = projection.depths[0]
    tiles = build_tile_lists(projection, blocks=blocks)
    pairs = tiles.ids.shape[0]
    assert int(tiles.offsets[-1]) == pairs == int(projection.tile_counts.sum())
    of_place = torch.repeat_interleave(
        torch.arange(tiles.offsets.shape[0] - 1), tiles.offsets.diff().long()
    )
    depths = projection.depths[tiles.ids.long()]
    keys = list(zip(of_place.tolist(), depths.tolist(), tiles.ids.tolist(), strict=True))
    assert keys == sorted(keys)
    assert sorted(tiles.places.tolist()) == list(range(pairs))
    for i in (tiles.counts > 0).nonzero()[:20, 0].tolist():
        begin = int(tiles.first_intersections[i])
        places = tiles.places[begin : begin + int(tiles.counts[i])]
        assert bool((tiles.ids[places.long()] == i).all())
        assert bool((places.diff() > 0).all())


def test_a_launch_of_no_blocks_is_no_launch():
    launch_blocks(None, 0, [], device=torch.device("cpu"), block_dim=32)


@pytest.mark.parametrize("blocks", [True, False])
def test_more_pairs_than_can_be_numbered_are_refused(blocks, monkeypatch):
    monkeypatch.setattr(rasterizers, "_MAX_INTERSECTIONS", 10)
    with pytest.raises(UserError, match=r"view \(70 x 50\) needs \d+ \(tile, Gaussian\) pairs"):
        build_tile_lists(projected(250), blocks=blocks)


def test_a_tensor_that_is_an_argument_outlives_its_name():
    argument = as_array(torch.ones(1000))
    reused = torch.zeros(1000)
    assert argument.tensor.data_ptr() != reused.data_ptr()


def all_tiles_of_the_rectangles(projection):
    """The same splats, listed in every tile of their rectangles."""
    left, right, top, bottom = projection.tile_rects.unbind(-1)
    splats = projection.splats.detach().clone()
    # A needle so thin that its ellipse is not tried.
    splats[:, 3] = (splats[:, 2] * splats[:, 4]).sqrt()
    counts = (right - left) * (bottom - top)
    return type(projection)(
        **{**vars(projection), "splats": splats, "tile_counts": counts.to(torch.int32)}
    )


@pytest.mark.parametrize("seed", range(4))
def test_tiles_that_are_left_out_lose_no_pixel_and_no_gradient(seed):
    def stretch(gaussians):
        gaussians.scales[:150] *= torch.tensor([8.0, 0.3, 0.05])
        if seed % 2:
            gaussians.cutoff_deviations = 2.5

    projection = projected(400, seed, width=120, height=90, change=stretch)
    boxes = build_tile_lists(all_tiles_of_the_rectangles(projection))
    tiles = build_tile_lists(projection)
    assert tiles.ids.shape[0] < 0.9 * boxes.ids.shape[0]
    rows = Rows(0, 90)
    background, d_pixels, d_transmittance = random_inputs(projection, rows)
    results = []
    for lists in (tiles, boxes):
        blended = blend_rows(projection.splats, lists, background, rows)
        gradients = SplatGradients.zeros(projection)
        backpropagate_rows(projection.splats, lists, blended, d_pixels, d_transmittance, gradients)
        results.append((blended.pixels, blended.transmittance, *vars(gradients).values()))
    for found, expected in zip(*results, strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("height", "width", "top", "end"),
    [(37, 45, 0, 37), (70, 33, 5, 66), (1, 1, 0, 1), (2, 9, 0, 2), (2 * RUN, 20, 0, 2 * RUN)],
)
def test_the_colour_loss_by_columns_matches_float64(height, width, top, end):
    g = torch.Generator().manual_seed(0)
    target = torch.rand(height, width, 3, generator=g)
    image = (target + 0.2 * torch.randn(height, width, 3, generator=g)).clamp(0, 1)
    n_values = 3 * width * height

    leaf = image.clone().requires_grad_(True)
    how = (CountedRows(top, end, n_values, 0.2, (end - top) / height), photometric_cuda)
    loss, l1, ssim = FusedPhotometric.apply(leaf, target, *how)
    (0.8 * l1 - 0.3 * ssim).backward()
    twin = image.double().requires_grad_(True)
    expected_l1 = (twin - target)[top:end].abs().sum() / n_values
    expected_ssim = ssim_map_reference(twin, target.double())[top:end].sum() / n_values
    (0.8 * expected_l1 - 0.3 * expected_ssim).backward()

    assert l1.item() == pytest.approx(expected_l1.item(), abs=1e-6)
    assert ssim.item() == pytest.approx(expected_ssim.item(), abs=1e-6)
    assert_equal_but_for_rounding(leaf.grad, twin.grad, 1e-5)
    with torch.no_grad():
        assert FusedPhotometric.apply(image, target, *how)[2].item() == ssim.item()
    native = color_terms(image, target, 0.2, rows=slice(top, end), total_rows=height)
    assert l1.item() == pytest.approx(native[1].item(), rel=1e-5)
    assert loss.item() == pytest.approx(native[0].item(), rel=1e-5, abs=1e-7)
    by_loss = image.clone().requires_grad_(True)
    FusedPhotometric.apply(by_loss, target, *how)[0].backward()
    twin.grad = None
    exact_l1 = (twin - target)[top:end].abs().sum() / n_values
    exact_ssim = ssim_map_reference(twin, target.double())[top:end].sum() / n_values
    (0.8 * exact_l1 - 0.2 * exact_ssim).backward()
    assert_equal_but_for_rounding(by_loss.grad, twin.grad, 1e-5)
