# SPDX-License-Identifier: Apache-2.0
"""The table of all camera formats, in the order in which they are looked for."""

from __future__ import annotations

from sugar_capture.camera_readers.bundler import read_bundler
from sugar_capture.camera_readers.entries import CameraFormat
from sugar_capture.camera_readers.metashape import read_metashape
from sugar_capture.camera_readers.openmvg import read_openmvg
from sugar_capture.camera_readers.opensfm import read_opensfm
from sugar_capture.camera_readers.parsing import has_words
from sugar_capture.camera_readers.polycam import read_polycam
from sugar_capture.camera_readers.reality_csv import is_reality_csv, read_reality_csv
from sugar_capture.camera_readers.reality_xmp import XCR_NAMESPACE, read_reality_xmp
from sugar_capture.camera_readers.record3d import read_record3d

FORMATS = (
    CameraFormat(
        program="Metashape",
        patterns=("*.xml",),
        accepts=has_words(b"<document", b"<chunk"),
        read=read_metashape,
    ),
    CameraFormat(
        program="RealityScan",
        patterns=("*.csv",),
        accepts=is_reality_csv,
        read=read_reality_csv,
    ),
    CameraFormat(
        program="RealityScan",
        patterns=("**/*.xmp",),
        accepts=has_words(XCR_NAMESPACE.encode()),
        read=read_reality_xmp,
        is_one_file_per_image=True,
    ),
    CameraFormat(
        program="Bundler",
        patterns=("bundle.out", "bundle/bundle.out"),
        accepts=has_words(b"# Bundle file"),
        read=read_bundler,
    ),
    CameraFormat(
        program="OpenMVG",
        patterns=("sfm_data.json",),
        accepts=has_words(b'"sfm_data_version"'),
        read=read_openmvg,
    ),
    CameraFormat(
        program="OpenSfM",
        patterns=("reconstruction.json", "opensfm/reconstruction.json"),
        accepts=has_words(b'"cameras"'),
        read=read_opensfm,
    ),
    CameraFormat(
        program="Polycam",
        patterns=("keyframes/corrected_cameras/*.json", "keyframes/cameras/*.json"),
        accepts=has_words(b'"t_00"'),
        read=read_polycam,
        is_one_file_per_image=True,
    ),
    CameraFormat(
        program="Record3D",
        patterns=("metadata.json", "metadata"),
        accepts=has_words(b'"poses"', within=-1),
        read=read_record3d,
    ),
)
