# SPDX-License-Identifier: Apache-2.0
"""Geometry nodes that make a point cloud of vertices; Blender 4.2 has no other way for scripts."""

import bpy

RADIUS = "radius"
"""Attribute with the radii of points."""


def point_nodes(material: bpy.types.Material) -> bpy.types.NodeTree:
    """Make a node group that turns vertices into points, which keep their attributes."""
    tree = bpy.data.node_groups.new("Gaussians as points", "GeometryNodeTree")
    for direction in ("INPUT", "OUTPUT"):
        tree.interface.new_socket("Geometry", in_out=direction, socket_type="NodeSocketGeometry")
    nodes = tree.nodes
    vertices = nodes.new("NodeGroupInput")
    points = nodes.new("GeometryNodeMeshToPoints")
    radius = nodes.new("GeometryNodeInputNamedAttribute")
    radius.data_type = "FLOAT"
    radius.inputs["Name"].default_value = RADIUS
    painted = nodes.new("GeometryNodeSetMaterial")
    painted.inputs["Material"].default_value = material
    output = nodes.new("NodeGroupOutput")
    links = tree.links
    links.new(vertices.outputs["Geometry"], points.inputs["Mesh"])
    links.new(radius.outputs["Attribute"], points.inputs["Radius"])
    links.new(points.outputs["Points"], painted.inputs["Geometry"])
    links.new(painted.outputs["Geometry"], output.inputs["Geometry"])
    return tree
