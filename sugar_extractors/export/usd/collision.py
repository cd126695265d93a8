# SPDX-License-Identifier: Apache-2.0
"""Shapes to collide with in USD: prims with ``PhysicsCollisionAPI`` that no viewer draws."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from sugar_extractors.export.usd.geometry import set_triangles
from sugar_extractors.export_contents import Collider

COLLISION = "Collision"
"""Name of the prim above the shapes."""


def define_collider(usd: ModuleType, stage: Any, root: str, collider: Collider) -> None:
    """Add the shapes of a collider to a stage with a mesh, with the purpose ``guide``.

    Args:
        usd: The package, by :func:`~sugar_extractors.export.usd.library.load_usd`.
        stage: The stage.
        root: Path of its root prim.
        collider: The shapes, y up.
    """
    tokens = usd.UsdPhysics.Tokens
    approximation = tokens.convexHull if collider.convex else tokens.none
    place = f"{root}/{COLLISION}"
    parent = usd.UsdGeom.Xform.Define(stage, place)
    usd.UsdGeom.Imageable(parent).CreatePurposeAttr(usd.UsdGeom.Tokens.guide)
    for number, shape in enumerate(collider.shapes):
        mesh = usd.UsdGeom.Mesh.Define(stage, f"{place}/Shape_{number:02d}")
        set_triangles(usd, mesh, shape.vertices, shape.faces)
        make_static(usd, mesh.GetPrim(), approximation)


def make_static(usd: ModuleType, prim: Any, approximation: str) -> None:
    """Make a mesh a static collider.

    Args:
        usd: The package.
        prim: The prim of the mesh.
        approximation: Token of ``UsdPhysics``: ``convexHull``, or ``none`` for its triangles.
    """
    physics = usd.UsdPhysics
    physics.CollisionAPI.Apply(prim)
    collider = physics.MeshCollisionAPI.Apply(prim)
    collider.CreateApproximationAttr(approximation)
