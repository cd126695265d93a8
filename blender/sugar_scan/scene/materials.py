# SPDX-License-Identifier: Apache-2.0
"""Materials: the picture of a mesh, and colours of Gaussians."""

from pathlib import Path

import bpy

COLOR = "gaussian_color"
"""Attribute with the colours of Gaussians, in linear light; Cycles shows one called color black."""

OPACITY = "opacity"
"""Attribute with the opacities of Gaussians."""


def picture_material(name: str, picture: Path | None, lit: bool) -> bpy.types.Material:
    """Make the material of a textured mesh.

    Args:
        name: Its name.
        picture: File of the picture; None for plain grey.
        lit: Whether lamps light it; else it has the colours of the photographs anywhere.
    """
    material = _empty_material(name)
    nodes = material.node_tree.nodes
    links = material.node_tree.links
    output = nodes.new("ShaderNodeOutputMaterial")
    shader = nodes.new("ShaderNodeBsdfPrincipled" if lit else "ShaderNodeEmission")
    color = shader.inputs["Base Color" if lit else "Color"]
    if lit:
        shader.inputs["Roughness"].default_value = 1.0
        shader.inputs["Specular IOR Level"].default_value = 0.0
    if picture is not None:
        texture = nodes.new("ShaderNodeTexImage")
        texture.image = bpy.data.images.load(str(picture), check_existing=True)
        texture.extension = "EXTEND"
        links.new(texture.outputs["Color"], color)
    links.new(shader.outputs[0], output.inputs["Surface"])
    return material


def point_material() -> bpy.types.Material:
    """Make the material of points with the colours of Gaussians."""
    material = _empty_material("Gaussians as points")
    nodes = material.node_tree.nodes
    links = material.node_tree.links
    output = nodes.new("ShaderNodeOutputMaterial")
    links.new(_emission(nodes, links).outputs[0], output.inputs["Surface"])
    return material


def ellipse_material() -> bpy.types.Material:
    """Make the material of ellipses, whose opacity falls off as that of a Gaussian.

    Texture coordinates are distances from the middle in standard deviations.
    """
    material = _empty_material("Gaussians as ellipses")
    nodes = material.node_tree.nodes
    links = material.node_tree.links
    output = nodes.new("ShaderNodeOutputMaterial")
    mix = nodes.new("ShaderNodeMixShader")
    places = nodes.new("ShaderNodeUVMap")
    square = nodes.new("ShaderNodeVectorMath")
    square.operation = "DOT_PRODUCT"
    links.new(places.outputs["UV"], square.inputs[0])
    links.new(places.outputs["UV"], square.inputs[1])
    half = _math(nodes, "MULTIPLY", -0.5)
    links.new(square.outputs["Value"], half.inputs[0])
    falloff = _math(nodes, "EXPONENT")
    links.new(half.outputs[0], falloff.inputs[0])
    opacity = _attribute(nodes, OPACITY)
    alpha = _math(nodes, "MULTIPLY")
    links.new(falloff.outputs[0], alpha.inputs[0])
    links.new(opacity.outputs["Fac"], alpha.inputs[1])
    links.new(alpha.outputs[0], mix.inputs["Fac"])
    links.new(nodes.new("ShaderNodeBsdfTransparent").outputs[0], mix.inputs[1])
    links.new(_emission(nodes, links).outputs[0], mix.inputs[2])
    links.new(mix.outputs[0], output.inputs["Surface"])
    return material


def _empty_material(name: str) -> bpy.types.Material:
    """Make a material without nodes."""
    material = bpy.data.materials.new(name)
    material.use_nodes = True
    material.node_tree.nodes.clear()
    return material


def _emission(nodes: bpy.types.Nodes, links: bpy.types.NodeLinks) -> bpy.types.Node:
    """Add a shader that emits the colours of Gaussians."""
    shader = nodes.new("ShaderNodeEmission")
    links.new(_attribute(nodes, COLOR).outputs["Color"], shader.inputs["Color"])
    return shader


def _attribute(nodes: bpy.types.Nodes, name: str) -> bpy.types.Node:
    node = nodes.new("ShaderNodeAttribute")
    node.attribute_name = name
    return node


def _math(nodes: bpy.types.Nodes, operation: str, second: float | None = None) -> bpy.types.Node:
    node = nodes.new("ShaderNodeMath")
    node.operation = operation
    if second is not None:
        node.inputs[1].default_value = second
    return node
