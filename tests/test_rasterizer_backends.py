# SPDX-License-Identifier: Apache-2.0
"""Rasterizers of other packages behind our seam, proven on stand-ins with their interfaces."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch

from gaussian_splatting.engine.loss_terms import COLOR
from gaussian_splatting.engine.strips import ImageSplit, ViewPass
from gaussian_splatting.engine.training_views import TrainingView
from gaussian_splatting.rasterization import WARP, Rows, backends, project, rasterize, render_view
from gaussian_splatting.rasterization.backends import (
    GsplatRasterizer,
    InriaRasterizer,
    choose_rasterizer,
    load_gsplat,
    load_inria,
    self_test,
)
from sugar_utils.errors import UserError
from tests.support.random_scenes import look_at, random_gaussians
from tests.support.rasterizer_doubles import FakeGsplat, FakeInria, OlderSettings

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
SLOW = pytest.mark.slow
"""Variants of what other tests show."""
BACKENDS = {
    "gsplat": lambda: GsplatRasterizer(FakeGsplat()),
    "inria": lambda: InriaRasterizer(FakeInria()),
}
each_backend = pytest.mark.parametrize("make", BACKENDS.values(), ids=BACKENDS)
one_at_once = pytest.mark.parametrize(
    "make",
    [BACKENDS["gsplat"], pytest.param(BACKENDS["inria"], marks=SLOW)],
    ids=BACKENDS,
)
"""The same, the slower stand-in among the slow tests."""


def scene(opaque: bool = False):
    """Clustered Gaussians, some behind the camera; none above gsplat's and our cap unless asked."""
    gaussians = random_gaussians(40, 3, torch.float32)
    if not opaque:
        gaussians.opacities = gaussians.opacities * 0.98
    camera = look_at((2.5, 1.0, 0.6), width=20, height=37, focal=36.0, principal=(1.3, -2.1))
    return gaussians.as_leaves(), camera


def close(found, expected, tolerance=1e-4):
    """Near in the norm: a splat that just misses the least alpha may count on one side only."""
    error = (found.double() - expected.double()).norm()
    assert float(error) <= tolerance * float(expected.double().norm()) + 1e-6


def rendered(rasterizer, opaque=False):
    """All images and the gradients of all parameters, of a sum with random weights."""
    gaussians, camera = scene(opaque)
    features = torch.rand(len(gaussians), 2, generator=torch.Generator().manual_seed(1))
    features.requires_grad_()
    output = rasterize(
        gaussians,
        camera,
        torch.tensor([0.2, 0.5, 0.9]),
        depth=True,
        normal=True,
        features=features,
        farthest_depth_behind=True,
        rasterizer=rasterizer,
    )
    images = {n: getattr(output, n) for n in ("image", "depth", "normal", "features", "alpha")}
    draws = torch.Generator().manual_seed(2)
    loss = sum((torch.randn(i.shape, generator=draws) * i).sum() for i in images.values())
    leaves = [*gaussians.tensors(), features]
    grads = torch.autograd.grad(loss, leaves)
    return {**images, **{f"gradient {k}": g for k, g in enumerate(grads)}}


@each_backend
def test_images_and_gradients_are_those_of_the_built_in_rasterizer(make):
    expected, found = rendered(WARP), rendered(make())
    for name, values in expected.items():
        assert float(values.abs().max()) > 0, name
        close(found[name], values)


def test_the_cap_of_alpha_is_the_same_in_inria():
    expected, found = rendered(WARP, opaque=True), rendered(BACKENDS["inria"](), opaque=True)
    for name, values in expected.items():
        close(found[name], values)


def test_opacities_above_the_cap_are_one_percent_off_in_gsplat_and_still_learn():
    expected, found = rendered(WARP, opaque=True), rendered(BACKENDS["gsplat"](), opaque=True)
    close(found["alpha"], expected["alpha"], 0.01)
    close(found["image"], expected["image"], 0.02)
    opacity = found["gradient 3"][:10]
    assert bool((opacity != 0).any())


@each_backend
def test_strips_add_up_to_the_whole_image(make):
    photograph = torch.rand(37, 20, 3, generator=torch.Generator().manual_seed(5))
    results = []
    for rasterizer, how in ((WARP, ImageSplit()), (make(), ImageSplit(3))):
        gaussians, camera = scene()
        projected = project(gaussians, camera, depth=True)
        view = TrainingView(camera, photograph, background=torch.ones(3))
        view_pass = ViewPass(projected, view, how, rasterizer=rasterizer)
        depth = view_pass.depth()
        terms, d_means2d = view_pass.backpropagate([COLOR], torch.ones_like(depth))
        gradients = [tensor.grad for tensor in gaussians.tensors()]
        results.append([depth, terms["color"], d_means2d, *gradients])
    for expected, found in zip(*results, strict=True):
        close(found, expected)


@one_at_once
def test_rows_are_those_of_the_whole_image(make):
    gaussians, camera = scene()
    rasterizer, projection = make(), project(gaussians, camera)
    tiles = rasterizer.build_tile_lists(projection)
    background = torch.tensor([0.1, 0.2, 0.3])
    whole = rasterizer.blend_rows(projection.splats, tiles, background, Rows(0, 37))
    part = rasterizer.blend_rows(projection.splats, tiles, background, Rows(11, 30))
    assert whole.pixels.shape == (37, 20, 3)
    close(part.pixels, whole.pixels[11:30], 1e-4)
    close(part.transmittance, whole.transmittance[11:30], 1e-4)


@each_backend
def test_nothing_to_see_is_the_background(make):
    gaussians, camera = scene()
    nothing = type(gaussians)(*(t.detach()[:0].requires_grad_() for t in gaussians.tensors()))
    output = rasterize(nothing, camera, torch.tensor([0.2, 0.5, 0.9]), rasterizer=make())
    assert torch.equal(output.image, torch.tensor([0.2, 0.5, 0.9]).expand(37, 20, 3))
    output.image.sum().backward()
    assert nothing.means.grad.shape == (0, 3)


@each_backend
def test_a_model_whose_gaussians_end_is_refused(make):
    gaussians, camera = scene()
    gaussians = replace(gaussians, cutoff_deviations=2.5)
    with pytest.raises(UserError, match=r"--rasterizer \w+ cannot render this model"):
        rasterize(gaussians, camera, rasterizer=make())


@one_at_once
def test_evaluation_renders_with_the_chosen_rasterizer(make):
    gaussians, camera = scene()
    expected = render_view(gaussians, camera, white=True, geometry=True)
    found = render_view(gaussians, camera, white=True, geometry=True, rasterizer=make())
    close(found.image, expected.image)
    close(found.depth, expected.depth)
    assert not found.image.requires_grad


@pytest.mark.slow
def test_channels_of_inria_come_in_as_few_passes_as_possible():
    gaussians, camera = scene()
    package = FakeInria()
    rasterize(gaussians, camera, depth=True, normal=True, rasterizer=InriaRasterizer(package))
    assert package.passes == 3  # six channels and the one of ones


@pytest.mark.parametrize(
    "package",
    [
        FakeInria(OlderSettings, extra_outputs=1),
        pytest.param(FakeInria(extra_outputs=1), marks=SLOW),
        pytest.param(FakeInria(extra_outputs=2), marks=SLOW),
    ],
    ids=["older settings", "depth", "depth and alpha"],
)
def test_forks_of_inria_are_understood(package):
    assert self_test(InriaRasterizer(package), CPU) is None


def test_a_fork_of_inria_with_unknown_settings_is_refused():
    class Settings(NamedTuple):
        image_height: int
        kernel_size: float

    with pytest.raises(UserError, match="kernel_size"):
        InriaRasterizer(FakeInria(Settings))


# The self-test


@one_at_once
def test_right_rasterizers_pass_the_self_test(make):
    assert self_test(make(), CPU) is None


def test_the_built_in_rasterizer_passes_its_own_test():
    assert self_test(WARP, CPU) is None


def halved(name):
    """gsplat whose gradient of some argument is half of what it should be."""

    class Wrong(FakeGsplat):
        def rasterize_to_pixels(self, means2d, conics, colors, opacities, *rest, **named):
            given = {"means2d": means2d, "conics": conics, "colors": colors, "opacities": opacities}
            given[name] = 0.5 * given[name] + 0.5 * given[name].detach()
            return super().rasterize_to_pixels(*given.values(), *rest, **named)

    return Wrong()


def with_attribute(name, value):
    package = FakeGsplat()
    setattr(package, name, value)
    return package


def failing(*_, **__):
    raise RuntimeError("CUDA error: no kernel image\nis available")


@pytest.mark.parametrize(
    ("rasterizer", "complaint"),
    [
        (GsplatRasterizer(with_attribute("center", 0.0)), "pixels"),
        pytest.param(GsplatRasterizer(with_attribute("cap", 0.3)), "pixels", marks=SLOW),
        (GsplatRasterizer(halved("means2d")), "gradients of centres"),
        pytest.param(GsplatRasterizer(halved("conics")), "gradients of shapes", marks=SLOW),
        pytest.param(GsplatRasterizer(halved("opacities")), "gradients of opacities", marks=SLOW),
        pytest.param(GsplatRasterizer(halved("colors")), "gradients of channels", marks=SLOW),
        (
            GsplatRasterizer(with_attribute("rasterize_to_pixels", failing)),
            "no kernel image is available",
        ),
        pytest.param(InriaRasterizer(FakeInria(low_pass=0.0)), "pixels", marks=SLOW),
        pytest.param(InriaRasterizer(FakeInria(low_pass=0.5)), "pixels", marks=SLOW),
    ],
    ids=[
        "half pixel",
        "cap",
        "centres",
        "shapes",
        "opacities",
        "channels",
        "raises",
        "thin",
        "fat",
    ],
)
def test_wrong_rasterizers_fail_the_self_test(rasterizer, complaint):
    fault = self_test(rasterizer, CPU)
    assert complaint in fault
    assert "\n" not in fault


# The choice


@pytest.mark.parametrize("device", [CPU, CUDA], ids=str)
@pytest.mark.parametrize("name", ["auto", "warp"])
def test_the_built_in_rasterizer_is_the_default_everywhere(name, device):
    rasterizer, reason = choose_rasterizer(name, device)
    assert rasterizer is WARP
    assert "warp" in reason


@pytest.mark.parametrize("name", ["gsplat", "inria"])
def test_other_packages_need_a_gpu(name):
    with pytest.raises(UserError, match=f"--rasterizer {name} .*CUDA devices only"):
        choose_rasterizer(name, CPU)


def installed(monkeypatch, module, package):
    monkeypatch.setitem(sys.modules, module, package)


@pytest.mark.parametrize(
    ("name", "module"), [("gsplat", "gsplat"), ("inria", "diff_gaussian_rasterization")]
)
def test_a_missing_package_is_one_line(name, module, monkeypatch):
    installed(monkeypatch, module, None)
    with pytest.raises(UserError, match=f"--rasterizer {name}: {module} cannot be imported") as e:
        choose_rasterizer(name, CUDA)
    assert "\n" not in str(e.value)


@pytest.mark.parametrize(
    ("name", "module", "package", "kind"),
    [
        ("gsplat", "gsplat", FakeGsplat(), GsplatRasterizer),
        ("inria", "diff_gaussian_rasterization", FakeInria(), InriaRasterizer),
    ],
    ids=["gsplat", "inria"],
)
def test_an_installed_package_is_tested_and_taken(name, module, package, kind, monkeypatch):
    installed(monkeypatch, module, package)
    tested = []
    monkeypatch.setattr(backends, "self_test", lambda *given: tested.append(given))
    rasterizer, reason = choose_rasterizer(name, CUDA)
    assert isinstance(rasterizer, kind)
    assert tested == [(rasterizer, CUDA)]
    assert reason == f"rasterizer: {name}, by --rasterizer; its self-test passed"


def test_a_package_that_fails_its_test_is_an_error(monkeypatch):
    installed(monkeypatch, "gsplat", FakeGsplat())
    monkeypatch.setattr(backends, "self_test", lambda *_: "its pixels differ by 1")
    with pytest.raises(UserError, match="self-test failed, its pixels differ") as caught:
        choose_rasterizer("gsplat", CUDA)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    "package",
    [SimpleNamespace(__version__="1.4.0"), SimpleNamespace(__version__="1.5.3"), SimpleNamespace()],
    ids=["old", "incomplete", "unnamed"],
)
def test_an_old_gsplat_is_refused(package, monkeypatch):
    installed(monkeypatch, "gsplat", package)
    with pytest.raises(UserError, match=r"is not 1\.5 or newer"):
        load_gsplat()


def test_versions_with_local_parts_are_read(monkeypatch):
    installed(monkeypatch, "gsplat", with_attribute("__version__", "1.10.0+pt213cu130"))
    assert load_gsplat().name == "gsplat"
    installed(monkeypatch, "diff_gaussian_rasterization", FakeInria())
    assert load_inria().name == "inria"


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(
    ("name", "module"), [("gsplat", "gsplat"), ("inria", "diff_gaussian_rasterization")]
)
def test_the_real_package_passes_the_self_test_where_it_is_installed(name, module):
    pytest.importorskip(module)
    rasterizer, _ = choose_rasterizer(name, torch.device("cuda", 0))
    assert rasterizer.name == name
