# SPDX-License-Identifier: Apache-2.0
"""Kernels on a device against plain float64 on the CPU, each check by itself.

On a CPU the kernels are those that a GPU runs, too: as fibers, or as one thread after the other.
Memory that torch hands out is filled with NaN first, so that what a kernel forgets to write is
seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
import warp as wp
from torch import Tensor

from benchmarks.gpu import parity_values
from benchmarks.gpu.common import Check, Finding, Setup, compare, draw, equal, on_device
from gaussian_splatting.core.cloud import NO_CUTOFF
from gaussian_splatting.data.cameras import Camera
from gaussian_splatting.losses import photometric_cuda
from gaussian_splatting.losses.color_loss import CountedRows
from gaussian_splatting.losses.photometric import FusedPhotometric
from gaussian_splatting.losses.ssim_reference import ssim_map_reference
from gaussian_splatting.rasterization import (
    Projection,
    Rows,
    SplatGradients,
    TileLists,
    backpropagate_rows,
    blend_rows,
    build_tile_lists,
    channel_background,
    complete_normals,
    project,
)
from gaussian_splatting.rasterization.projection_kernels import SPLAT_HEADER
from gaussian_splatting.rasterization.tile_coverage import count_tiles
from sugar_scene.triangle_rasterizer import rasterize_triangles, to_camera
from sugar_utils.warp_launch import as_array, launch
from tests.support.random_scenes import look_at, random_gaussians
from tests.support.reference_rasterizer import (
    project_reference,
    rasterize_reference,
    sh_basis_of,
)

FLIPS = 2e-3
"""Share of entries that may lie on the other side of a threshold than in float64."""

COLOR = (0.2, 0.5, 0.9)
PARAMETERS = ("means", "quats", "scales", "opacities", "sh_dc", "sh_rest")


def poisoned(run: Callable[[Setup], Iterator[Finding]]) -> Callable[[Setup], Iterator[Finding]]:
    """The same check while ``torch.empty`` returns memory that is filled with NaN."""

    def inside(setup: Setup) -> Iterator[Finding]:
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            yield from run(setup)
        finally:
            torch.use_deterministic_algorithms(False)

    return inside


def view(setup: Setup, zoom: int = 8) -> Camera:
    """An oblique view, in quick tries small."""
    zoom = setup.size(zoom, 1)
    return look_at((2.5, 1.2, 0.3), width=70 * zoom, height=50 * zoom, focal=60.0 * zoom)


def projection(setup: Setup) -> Iterator[Finding]:
    """Splats and colours, forward and backward."""
    n, camera = setup.size(20_000, 300), view(setup)
    exact = random_gaussians(n, 1).as_leaves()
    features = draw(n, 1)
    leaves = on_device(random_gaussians(n, 1, torch.float32), setup.place).as_leaves()
    found = project(leaves, camera, depth=True, features=features.to(setup.place))

    expected = project_reference(exact, camera)
    center = torch.as_tensor(camera.center, dtype=torch.float64)
    basis = sh_basis_of(torch.nn.functional.normalize(exact.means - center, dim=-1))
    coefficients = torch.cat([exact.sh_dc, exact.sh_rest], dim=1)
    colors = ((basis[..., None] * coefficients).sum(dim=1) + 0.5).clamp_min(0)
    opacities = exact.opacities[:, None]
    columns = [expected.conics, opacities, colors, expected.depths[:, None]]

    yield compare("radii", found.radii, expected.radii, 0.0, flips=FLIPS)
    seen = (found.radii.cpu() > 0) & (expected.radii > 0)
    splats = found.splats.detach().cpu()
    yield compare("centres", found.means2d.cpu()[seen], expected.means2d[seen], 1e-5)
    values = torch.cat([splats[:, 2:6], splats[:, SPLAT_HEADER:-1]], dim=1)
    yield compare("conics, colours, depths", values[seen], torch.cat(columns, dim=1)[seen], 1e-4)
    yield equal("features", splats[seen][:, -1], features[seen][:, 0])

    weights = draw(*splats.shape, seed=1) * seen[:, None]
    weights[:, :2] = 0
    weights[:, 6:SPLAT_HEADER] = 0
    centres = draw(n, 2, seed=2) * seen[:, None]
    torch.autograd.backward(
        [found.means2d, found.splats], [centres.to(setup.place), weights.to(setup.place)]
    )
    used = torch.cat([weights[:, 2:6], weights[:, SPLAT_HEADER:-1]], dim=1).double()
    zero = torch.zeros((), dtype=torch.float64)
    loss = torch.where(seen[:, None], torch.cat(columns, dim=1) * used, zero).sum()
    loss = loss + torch.where(seen[:, None], expected.means2d * centres, zero).sum()
    loss.backward()
    for name in PARAMETERS:
        grad = getattr(leaves, name).grad
        # Colours may be clamped at zero on one side only; thin Gaussians amplify rounding.
        yield compare(f"gradient of {name}", grad, getattr(exact, name).grad, 1e-4, flips=FLIPS)


def _on_cpu(found: Projection) -> Projection:
    tensors = ("means2d", "splats", "radii", "depths", "tile_rects", "tile_counts")
    return replace(found, **{name: getattr(found, name).detach().cpu() for name in tensors})


def _projected(
    setup: Setup, n: int, camera: Camera, seed: int = 1, cutoff: float = NO_CUTOFF
) -> Projection:
    """Seven channels: colour, depth, normal, one feature."""
    gaussians = on_device(random_gaussians(n, seed, torch.float32), setup.place)
    gaussians = replace(gaussians, cutoff_deviations=cutoff)
    features = draw(n, 1, seed=seed).to(setup.place)
    return project(gaussians, camera, depth=True, normal=True, features=features)


def tile_lists(setup: Setup) -> Iterator[Finding]:
    """Lists that a GPU sorts against those of native code, from the same splats."""
    most = setup.size(60_000, 700)
    for n, zoom, cutoff in (
        (most, 12, NO_CUTOFF),
        (most - 1, 12, 2.5),
        (1, 1, NO_CUTOFF),
        (0, 1, NO_CUTOFF),
    ):
        found = _projected(setup, n, view(setup, zoom), cutoff=cutoff)
        there = _on_cpu(found)
        counts = torch.empty_like(there.tile_counts)
        # Counting on one device and listing on the other must not differ either.
        rects = there.tile_rects.contiguous()
        launch(
            count_tiles,
            n,
            [there.splats, as_array(rects, wp.vec4i), counts],
            device=counts.device,
        )
        yield equal(f"tiles counted for {n:,}", found.tile_counts, counts)
        lists = build_tile_lists(found, blocks=True)
        expected = build_tile_lists(there, blocks=False)
        for name in ("offsets", "ids", "places", "counts"):
            yield equal(f"{name} of {n:,}", getattr(lists, name), getattr(expected, name))
        reached = expected.counts > 0
        starts = lists.first_intersections.cpu()[reached]
        yield equal(f"first pairs of {n:,}", starts, expected.first_intersections[reached])


def _backward(
    found: Projection,
    tiles: TileLists,
    background: Tensor,
    rows: Rows,
    d_pixels: Tensor,
    d_left: Tensor,
    *,
    blocks: bool,
) -> tuple[Tensor, Tensor, SplatGradients]:
    """Pixels and transmittance of some rows, and gradients for given ones of pixels."""
    blended = blend_rows(found.splats, tiles, background, rows, blocks=blocks)
    gradients = SplatGradients.zeros(found)
    backpropagate_rows(found.splats, tiles, blended, d_pixels, d_left, gradients, blocks=blocks)
    return blended.pixels, blended.transmittance, gradients


def blending(setup: Setup) -> Iterator[Finding]:
    """Seven channels forward and backward, down to the Gaussians, against the dense reference."""
    n, camera = setup.size(1_000, 200), look_at((2.5, 1.2, 0.3), width=90, height=70, focal=70.0)
    if setup.quick:
        camera = look_at((2.5, 1.2, 0.3), width=45, height=35)
    features, color = draw(n, 1), torch.tensor(COLOR)
    exact, exact_features = random_gaussians(n, 2).as_leaves(), features.double().requires_grad_()
    expected = rasterize_reference(exact, camera, color.double(), features=exact_features)
    images = (expected.image, expected.depth, expected.normal, expected.features, expected.alpha)
    weights = [draw(*image.shape, seed=i) for i, image in enumerate(images)]
    sum((image * w).sum() for image, w in zip(images, weights, strict=True)).backward()

    leaves = on_device(random_gaussians(n, 2, torch.float32), setup.place).as_leaves()
    own_features = features.to(setup.place, copy=True).requires_grad_()
    found = project(leaves, camera, depth=True, normal=True, features=own_features)
    tiles = build_tile_lists(found, blocks=True)
    behind = channel_background(found, color.to(setup.place))
    rows = Rows(0, camera.height)
    blended = blend_rows(found.splats, tiles, behind, rows, blocks=True)
    pixels = blended.pixels.detach().requires_grad_()
    left = blended.transmittance.detach().requires_grad_()
    own = (
        pixels[..., :3],
        pixels[..., 3],
        complete_normals(pixels[..., 4:6]),
        pixels[..., 6:],
        1 - left,
    )
    names = ("colour", "depth", "normal", "feature", "alpha")
    for name, image, truth in zip(names, own, images, strict=True):
        yield compare(name, image, truth, 3e-5, flips=FLIPS)
    sum((image * w.to(setup.place)).sum() for image, w in zip(own, weights, strict=True)).backward()
    gradients = SplatGradients.zeros(found)
    backpropagate_rows(found.splats, tiles, blended, pixels.grad, left.grad, gradients, blocks=True)
    torch.autograd.backward([found.means2d, found.splats], [gradients.means2d, gradients.splats])
    for name in PARAMETERS:
        grad, truth = getattr(leaves, name).grad, getattr(exact, name).grad
        yield compare(f"gradient of {name}", grad, truth, 1e-4, flips=FLIPS)
    yield compare("gradient of feature", own_features.grad, exact_features.grad, 1e-4, flips=FLIPS)


def blending_at_scale(setup: Setup) -> Iterator[Finding]:
    """A large image against native code of the CPU, from the same splats and lists."""
    camera = view(setup, 16)
    found = _projected(setup, setup.size(200_000, 400), camera, seed=4)
    there, behind = _on_cpu(found), torch.linspace(0.1, 0.7, 7)
    d_pixels, d_left = draw(camera.height, camera.width, 7), draw(camera.height, camera.width)
    rows, place = Rows(0, camera.height), setup.place
    tiles = build_tile_lists(found, blocks=True)
    pixels, left, gradients = _backward(
        found, tiles, behind.to(place), rows, d_pixels.to(place), d_left.to(place), blocks=True
    )
    truth, truth_left, truths = _backward(
        there, build_tile_lists(there, blocks=False), behind, rows, d_pixels, d_left, blocks=False
    )
    yield compare("pixels", pixels, truth, 3e-5, flips=FLIPS)
    yield compare("transmittance", left, truth_left, 3e-5, flips=FLIPS)
    yield compare("splat gradients", gradients.splats, truths.splats, 1e-4, flips=FLIPS)
    yield compare("centre gradients", gradients.means2d, truths.means2d, 1e-4, flips=FLIPS)


def color_loss(setup: Setup) -> Iterator[Finding]:
    """L1 and SSIM with their gradient, of a whole image and of some rows."""
    height, width = setup.size(622, 37), setup.size(960, 45)
    target = torch.rand(height, width, 3, generator=torch.Generator().manual_seed(0))
    image = (target + 0.2 * draw(height, width, 3)).clamp(0, 1)
    for top, end in ((0, height), (5, height - 4)):
        leaf = image.to(setup.place, copy=True).requires_grad_()
        n_values = 3 * width * height
        how = (CountedRows(top, end, n_values, 0.2, 1.0), photometric_cuda)
        _, l1, ssim = FusedPhotometric.apply(leaf, target.to(setup.place), *how)
        (0.8 * l1 - 0.3 * ssim).backward()
        exact = image.double().requires_grad_()
        true_l1 = (exact - target)[top:end].abs().sum() / n_values
        true_ssim = ssim_map_reference(exact, target.double())[top:end].sum() / n_values
        (0.8 * true_l1 - 0.3 * true_ssim).backward()
        of = f"rows {top} to {end}"
        yield compare(f"L1, {of}", l1.reshape(1), true_l1.reshape(1), 1e-5)
        yield compare(f"SSIM, {of}", ssim.reshape(1), true_ssim.reshape(1), 1e-5)
        yield compare(f"gradient, {of}", leaf.grad, exact.grad, 2e-5)


def _first_hits(corners: Tensor, camera: Camera) -> tuple[Tensor, Tensor]:
    """Face and depth at each pixel, by every ray and face in float64. (F, 3, 3) -> (H, W) each"""
    y, x = torch.meshgrid(torch.arange(camera.height), torch.arange(camera.width), indexing="ij")
    rays = torch.stack(
        [(x + 0.5 - camera.cx) / camera.fx, (y + 0.5 - camera.cy) / camera.fy, 0.0 * x + 1], -1
    ).double()
    nearest = torch.full(x.shape, torch.inf, dtype=torch.float64)
    face = torch.full(x.shape, -1)
    for index, (a, b, c) in enumerate(corners.double()):
        weights = [rays @ torch.linalg.cross(*pair) for pair in ((b, c), (c, a), (a, b))]
        volume = torch.dot(a, torch.linalg.cross(b, c))
        depth = volume / sum(weights)
        hit = torch.stack([w * volume.sign() >= 0 for w in weights]).all(dim=0)
        hit &= (depth > 0) & (depth < nearest)
        nearest[hit], face[hit] = depth[hit], index
    return face, nearest


def triangles(setup: Setup) -> Iterator[Finding]:
    """First hits of a soup that reaches behind the camera, large and small triangles."""
    camera = view(setup, 2)
    for size, n in ((0.05, 400), (0.7, 120)):
        n = setup.size(n, n // 4)
        corners = (3 * draw(n, 1, 3) + size * draw(n, 3, 3, seed=1)).reshape(-1, 3)
        faces = torch.arange(3 * n).reshape(n, 3)
        hits = rasterize_triangles(corners.to(setup.place), faces.to(setup.place), camera)
        face, depth = _first_hits(to_camera(corners, camera).reshape(n, 3, 3), camera)
        of = f"{n} triangles of size {size}"
        # Rays that graze an edge may fall on either side of it.
        yield compare(f"faces, {of}", hits.face.float() + 2, face.float() + 2, 0.0, flips=FLIPS)
        same = (hits.face.cpu() == face) & (face >= 0)
        yield compare(f"depths, {of}", hits.depth.cpu()[same], depth[same], 1e-5)
        total = hits.barycentrics.sum(dim=-1).cpu()
        yield compare(f"weights, {of}", total, (hits.face.cpu() >= 0).float(), 1e-5)


_CHECKS = {
    "projection": projection,
    "tile lists": tile_lists,
    "blending": blending,
    "blending at scale": blending_at_scale,
    "colour loss": color_loss,
    **parity_values.CHECKS,
    "triangles": triangles,
}
CHECKS = tuple(Check(name, poisoned(run)) for name, run in _CHECKS.items())
