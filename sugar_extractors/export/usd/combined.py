# SPDX-License-Identifier: Apache-2.0
"""A textured mesh and its Gaussians in one USDZ: Gaussians to look at, the mesh to walk on."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from sugar_extractors.export.usd.collision import define_collider, make_static
from sugar_extractors.export.usd.gaussians import define_field
from sugar_extractors.export.usd.library import load_usd, new_package
from sugar_extractors.export.usd.mesh import ROOT, define_mesh
from sugar_extractors.export_contents import CombinedExport

GAUSSIANS = f"{ROOT}/Gaussians"
"""Path of the prim of the Gaussians."""


def write_combined_usdz(export: CombinedExport) -> None:
    """Write a USDZ with Gaussians for rendering and a mesh as their proxy.

    The mesh is a collider, too, unless the export has shapes of its own to collide with.

    Raises:
        UserError: usd-core is not installed, or the file cannot be written.
    """
    usd = load_usd("--to usdz_both")
    with new_package(usd, export.path, export.target, "scan.usdc") as (stage, folder):
        shape = define_mesh(usd, stage, export.mesh, folder)
        field = define_field(usd, stage, GAUSSIANS, export.cloud)
        _set_purposes(usd, shape.GetPrim(), field)
        if export.collider is None:
            make_static(usd, shape.GetPrim(), usd.UsdPhysics.Tokens.none)
        else:
            define_collider(usd, stage, ROOT, export.collider)
        # Asset browsers list the whole as one thing.
        usd.Usd.ModelAPI(stage.GetDefaultPrim()).SetKind(usd.Kind.Tokens.component)


def _set_purposes(usd: ModuleType, mesh: Any, gaussians: Any) -> None:
    """Say which prim is for final pictures, and which one stands for it while one works."""
    tokens = usd.UsdGeom.Tokens
    proxy = usd.UsdGeom.Imageable(mesh)
    proxy.CreatePurposeAttr(tokens.proxy)
    rendered = usd.UsdGeom.Imageable(gaussians)
    rendered.CreatePurposeAttr(tokens.render)
    rendered.SetProxyPrim(proxy)
