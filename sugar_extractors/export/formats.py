# SPDX-License-Identifier: Apache-2.0
"""The table of export formats.

A new format is one entry of :data:`GAUSSIAN_FORMATS`, :data:`MESH_FORMATS`,
:data:`COMBINED_FORMATS` or :data:`POINT_FORMATS`; flags, help texts, suffixes, readers and writers
follow from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from gaussian_splatting.formats import readers, spz, streamed_sog
from gaussian_splatting.formats.ply import write_gaussian_ply
from gaussian_splatting.formats.sog import write_sog
from gaussian_splatting.formats.splat_file import write_splat
from sugar_extractors.export import (
    combined_gltf,
    gltf_gaussians,
    las_files,
    mesh_writers,
    original_frame,
)
from sugar_extractors.export.engines import glb_files, web_page
from sugar_extractors.export.format_kinds import (
    CombinedFormat,
    GaussianFormat,
    MeshFormat,
    PointFormat,
)
from sugar_extractors.export.format_types import AnyFormat, Axes
from sugar_extractors.export.usd.combined import write_combined_usdz
from sugar_extractors.export.usd.gaussians import read_usd_gaussians, write_usd_gaussians
from sugar_extractors.export.usd.library import load_usd
from sugar_utils.libraries import load_package

_MILLIMETRES_PER_METRE = 1000.0
GAUSSIAN_FORMATS = (
    GaussianFormat(
        name="spz",
        help="for phones and web pages, a tenth of the size",
        suffix=".spz",
        axes=Axes.Y_UP,
        writer=spz.write_spz,
        reader=readers.READERS[".spz"],
        read_suffixes=(".spz",),
        holds_antialiasing=True,
        fit=spz.spz_fit,
    ),
    GaussianFormat(
        name="spz4",
        help="its version 4",
        suffix=".spz",
        axes=Axes.Y_UP,
        writer=partial(spz.write_spz, version=4),
        reader=readers.READERS[".spz"],
        holds_antialiasing=True,
        fit=spz.spz_fit,
    ),
    GaussianFormat(
        name="sog",
        help="for PlayCanvas",
        suffix=".sog",
        writer=write_sog,
        reader=readers.READERS[".sog"],
        read_suffixes=(".sog",),
        holds_antialiasing=True,
    ),
    GaussianFormat(
        name="sog_lod",
        help="streamed by PlayCanvas in levels of detail, as a folder with lod-meta.json",
        suffix=".json",
        file_name=streamed_sog.INDEX,
        writer=streamed_sog.write_streamed_sog,
        reader=lambda path, notify: streamed_sog.read_streamed_sog(path),
        read_suffixes=(".json",),
        parts_of=streamed_sog.chunk_folders,
        holds_antialiasing=True,
    ),
    GaussianFormat(
        name="splat",
        help="without view-dependent colour",
        suffix=".splat",
        writer=write_splat,
        reader=readers.READERS[".splat"],
        read_suffixes=(".splat",),
    ),
    GaussianFormat(
        name="ply",
        suffix=".ply",
        writer=write_gaussian_ply,
        reader=readers.READERS[".ply"],
        read_suffixes=(".ply",),
        move_to_original=original_frame.move_ply,
        note_in_file=original_frame.note_in_ply,
    ),
    GaussianFormat(
        name="gltf",
        help="with KHR_gaussian_splatting, y up, as NAME.gltf.glb",
        suffix=".gltf.glb",
        axes=Axes.Y_UP,
        writer=gltf_gaussians.write_gltf_gaussians,
        reader=gltf_gaussians.read_gltf_gaussians,
        read_suffixes=(".glb",),
        move_to_original=original_frame.move_glb,
        note_in_file=original_frame.note_in_glb,
    ),
    GaussianFormat(
        name="usd",
        help="a ParticleField",
        suffix=".usd",
        axes=Axes.Y_UP,
        writer=write_usd_gaussians,
        reader=read_usd_gaussians,
        read_suffixes=(".usd", ".usda", ".usdc", ".usdz"),
        move_to_original=original_frame.move_usd,
        check_packages=partial(load_usd, "--to usd"),
    ),
)
MESH_FORMATS = (
    MeshFormat(
        name="glb",
        suffix=".glb",
        axes=Axes.Y_UP,
        writer=glb_files.write_glb,
        writer_turns=True,
        holds_normal_map=True,
        move_to_original=original_frame.move_glb,
        note_in_file=original_frame.note_in_glb,
        holds_colliders=True,
        holds_levels=True,
    ),
    MeshFormat(
        name="obj",
        suffix=".obj",
        writer=mesh_writers.write_obj,
        files_of=mesh_writers.obj_files,
        holds_normal_map=True,
        move_to_original=original_frame.move_obj,
        note_in_file=original_frame.note_in_obj,
    ),
    MeshFormat(
        name="usdz",
        help="for phones",
        suffix=".usdz",
        axes=Axes.Y_UP,
        writer=mesh_writers.write_usdz,
        check_packages=partial(load_usd, "--to usdz"),
        holds_colliders=True,
    ),
    MeshFormat(
        name="stl",
        help="for printers",
        suffix=".stl",
        axes=Axes.Z_UP,
        units_per_metre=_MILLIMETRES_PER_METRE,
        writer=partial(mesh_writers.write_printable, kind="stl"),
        for_printers=True,
    ),
    MeshFormat(
        name="3mf",
        help="for printers",
        suffix=".3mf",
        axes=Axes.Z_UP,
        units_per_metre=_MILLIMETRES_PER_METRE,
        writer=partial(mesh_writers.write_printable, kind="3mf"),
        for_printers=True,
        check_packages=partial(
            load_package, "--to 3mf", "lxml", "lxml.etree", instead="use --to stl"
        ),
    ),
)
COMBINED_FORMATS = (
    CombinedFormat(
        name="glb_both",
        help="with KHR_gaussian_splatting, a node for each, as NAME.both.glb",
        suffix=".both.glb",
        axes=Axes.Y_UP,
        writer=combined_gltf.write_combined_glb,
        reader=gltf_gaussians.read_gltf_gaussians,
        move_to_original=original_frame.move_glb,
        note_in_file=original_frame.note_in_glb,
        holds_colliders=True,
    ),
    CombinedFormat(
        name="usdz_both",
        help="Gaussians to render, the mesh as their proxy and collider, as NAME.both.usdz",
        suffix=".both.usdz",
        axes=Axes.Y_UP,
        writer=write_combined_usdz,
        reader=read_usd_gaussians,
        check_packages=partial(load_usd, "--to usdz_both"),
        holds_colliders=True,
    ),
    CombinedFormat(
        name="html",
        help="side by side in a page that browsers open without a server",
        suffix=".html",
        axes=Axes.Y_UP,
        writer=web_page.write_page,
        reader=web_page.read_page_gaussians,
        fit=spz.spz_fit,
        holds_antialiasing=True,
    ),
)
POINT_FORMATS = (
    PointFormat(
        name="las",
        help="for GIS, in float64, z up where it is upright",
        suffix=".las",
        axes=Axes.Z_UP,
        writer=las_files.write_las,
        check_packages=partial(las_files.load_laspy, "--to las"),
    ),
    PointFormat(
        name="laz",
        help="the same, compressed",
        suffix=".laz",
        axes=Axes.Z_UP,
        writer=partial(las_files.write_las, compressed=True),
        check_packages=partial(las_files.load_laspy, "--to laz", compressed=True),
    ),
)
FORMATS: dict[str, AnyFormat] = {
    entry.name: entry
    for entry in (*GAUSSIAN_FORMATS, *MESH_FORMATS, *COMBINED_FORMATS, *POINT_FORMATS)
}
GAUSSIANS = tuple(entry.name for entry in GAUSSIAN_FORMATS)
WITH_COLLIDERS = tuple(entry.name for entry in FORMATS.values() if entry.holds_colliders)
WITH_LEVELS = tuple(entry.name for entry in MESH_FORMATS if entry.holds_levels)
MESHES = tuple(entry.name for entry in MESH_FORMATS)
COMBINED = tuple(entry.name for entry in COMBINED_FORMATS)


def format_help() -> str:
    """Return the help of ``--to``: all formats with their descriptions."""
    return (
        f"format. Gaussians: {_described(GAUSSIAN_FORMATS)}. "
        f"Textured meshes: {_described(MESH_FORMATS)}. "
        f"Both in one file: {_described(COMBINED_FORMATS)}. "
        f"Points of either: {_described(POINT_FORMATS)}"
    )


def _described(entries: Sequence[AnyFormat]) -> str:
    """Return the names of formats with what each says of itself, as words of a sentence."""
    return "; ".join(f"{one.name}, {one.help}" if one.help else one.name for one in entries)


def readable_suffixes() -> str:
    """Return the main suffix of each readable format of Gaussians, as words of a sentence."""
    suffixes = [entry.read_suffixes[0] for entry in GAUSSIAN_FORMATS if entry.read_suffixes]
    return f"{', '.join(suffixes[:-1])} or {suffixes[-1]}"
