# SPDX-License-Identifier: Apache-2.0
"""Looking up files, images and cameras by the names that other programs give them.

All readers look names up here: of COLMAP models, of ``transforms*.json``, of cameras of other
programs, of masks and of depth maps. A name is tried as it is given, then without its first
folders, and in each case with another case, Unicode form or extension. A name that is not ASCII is
tried again in the encodings of other systems, see :func:`other_spellings`.
"""

from __future__ import annotations

import difflib
import itertools
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, Generic, TypeVar

from sugar_utils.errors import UserError

IMAGE_SUFFIXES = (
    *(".png", ".jpg", ".jpeg", ".webp", ".tif", ".tiff", ".bmp", ".ppm", ".jp2", ".gif"),
    *(".avif", ".mpo"),
)
HEIF_SUFFIXES = (".heic", ".heif", ".hif")
PHOTOGRAPH_SUFFIXES = (*IMAGE_SUFFIXES, *HEIF_SUFFIXES)
"""Of files as cameras write them, which convert reads."""

RAW_SUFFIXES = (".dng", ".cr2", ".cr3", ".nef", ".arw", ".raf", ".orf", ".rw2", ".pef")
VIDEO_SUFFIXES = (".mp4", ".mov", ".m4v", ".mkv", ".avi", ".webm", ".mts", ".m2ts", ".3gp")
ENCODINGS = ("utf-8", "gbk", "cp1252", "cp932", "cp949", "big5", "cp1251", "cp437", "cp850")
"""Encodings of file names: of Linux and macOS, then of Windows and of ZIP files by region."""

_MAX_SEARCHED = 200_000  # files of a folder and of all folders in it
_MAX_COMPARED = 5_000  # names among which the nearest one is looked for
_NEAR_ENOUGH = 0.5  # least similarity of a name that is proposed, from 0 to 1
# How much of the last part of a path a name has.
_WHOLE = "whole"
_STEM = "without extension"
_BEGINNING = "up to the first dot"  # as older 3DGS releases store names
_DRIVE = re.compile(r"[A-Za-z]:/")

Match = TypeVar("Match")
Named = TypeVar("Named", bound=Any)  # cameras, or other things that have a name


def normalized(name: str) -> str:
    """Spell a name with ``/`` between folders, without ``.`` folders."""
    path = PurePosixPath(name.replace("\\", "/"))
    return path.as_posix()


def other_spellings(name: str) -> Iterator[str]:
    """Yield a name that is not ASCII as it reads where its bytes are taken for another encoding.

    Bytes that are no UTF-8 are escaped in ``name`` and in the results as by :func:`os.fsdecode`.
    """
    if name.isascii():
        return
    earlier = {name}
    for source, target in itertools.permutations(ENCODINGS, 2):
        try:
            raw = name.encode(source, _on_error(source))
            spelling = raw.decode(target, _on_error(target))
        except UnicodeError:
            continue
        if spelling not in earlier:
            earlier.add(spelling)
            yield spelling


def first_match(name: str, lookup: Callable[[str], Match | None]) -> Match | None:
    """Look a name up as it is given, then in its other spellings.

    None where nothing matches, or where several spellings match different things.
    """
    match = lookup(name)
    if match is not None:
        return match
    matches = {lookup(spelling) for spelling in other_spellings(name)}
    matches.discard(None)
    return matches.pop() if len(matches) == 1 else None


def readable_name(raw: bytes, exists: Callable[[str], bool] | None = None) -> str:
    """Decode a name of unknown encoding.

    Bytes that are no UTF-8 are read in the first encoding in which ``exists`` knows the name; where
    there is none, in the first one that has all characters.
    """
    name = raw.decode("utf-8", "surrogateescape")
    spellings = [name, *other_spellings(name)]
    if exists is not None:
        for spelling in spellings:
            if _is_text(spelling) and exists(spelling):
                return spelling
    return next(filter(_is_text, spellings), ascii(name)[1:-1])


def nearest_name(name: str, candidates: Iterable[str], least: float = _NEAR_ENOUGH) -> str | None:
    """Return the candidate whose last part resembles that of a name most.

    Args:
        least: Similarity from 0 to 1 that it must have; None is returned where none has.
    """
    by_key: dict[str, str] = {}
    for candidate in itertools.islice(candidates, _MAX_COMPARED):
        by_key.setdefault(_key(PurePosixPath(candidate).name), candidate)
    target = _key(PurePosixPath(normalized(name)).name)
    matches = difflib.get_close_matches(target, by_key, n=1, cutoff=least)
    return by_key[matches[0]] if matches else None


def natural_order(name: str) -> list[tuple[int, int | str]]:
    """Sorting key that puts ``IMG_9`` before ``IMG_10``."""
    parts = re.split(r"(\d+)", name.lower())
    return [(0, int(part)) if part.isdecimal() else (1, part) for part in parts if part]


def paired_by_number(numbered: Sequence[str], photographs: Sequence[str]) -> dict[str, str] | None:
    """Pair files that are named by numbers alone with the photographs of a folder.

    A number means the photograph that has it in its name, or, where names do not have all numbers
    and there are as many files as photographs, its place in their order.

    Args:
        numbered: Names of the files, such as ``007.png``.
        photographs: Names of all photographs of the folder, those without a camera included.

    Returns:
        The name of the file of each photograph that has one; None where it is unclear.
    """
    by_number = {int(PurePosixPath(name).stem): name for name in numbered}
    if len(by_number) < len(numbered):
        return None
    numbers = _last_numbers(photographs)
    values = set(numbers.values())
    are_distinct = len(values) == len(photographs)
    if are_distinct and (values <= by_number.keys() or by_number.keys() <= values):
        return {name: by_number[n] for name, n in numbers.items() if n in by_number}
    # By place: sorted as text or as numbers, the photographs must have one order.
    in_order = sorted(photographs, key=natural_order)
    if len(numbered) != len(photographs) or in_order != sorted(photographs):
        return None
    places = sorted(by_number)
    pairs = dict(zip(in_order, places, strict=True))
    is_sequence = places[-1] - places[0] == len(places) - 1 and places[0] in (0, 1)
    if not is_sequence:
        shifts = set()
        if are_distinct:
            shifts = {numbers[name] - place for name, place in pairs.items()}
        if len(shifts) != 1:
            return None
    return {name: by_number[place] for name, place in pairs.items()}


def _last_numbers(names: Sequence[str]) -> dict[str, int]:
    """Return the last number in each name that has one."""
    numbers = {}
    for name in names:
        digits = re.findall(r"\d+", PurePosixPath(name).stem)
        if digits:
            numbers[name] = int(digits[-1])
    return numbers


class NameIndex:
    """An index of paths by the names that programs may give them.

    The last part of a name decides, then its folders: they must end as those of the path do, or
    be left out. A name that begins at the root of another machine may have any folders.

    Args:
        paths: Relative, with ``/`` between folders.
        suffixes: Extensions of the files to find, in the order in which they are preferred; None
            for names of any kind.
    """

    def __init__(
        self, paths: Iterable[str], suffixes: Sequence[str] | None = IMAGE_SUFFIXES
    ) -> None:
        self._suffixes = suffixes
        self._paths: list[str] = []
        # Paths by how much of their last part is spelt out, and by its spelling.
        self._by_spelling: dict[tuple[str, str], list[str]] = {}
        for path in sorted(paths):
            name = _key(PurePosixPath(normalized(path)).name)
            if suffixes is not None:
                # Archives from macOS carry a hidden ._name.jpg for every image.
                if PurePosixPath(name).suffix not in suffixes or name.startswith("."):
                    continue
                stem = PurePosixPath(name).stem
            else:
                stem = _stem(name)
            self._paths.append(path)
            for spelling in ((_WHOLE, name), (_STEM, stem), (_BEGINNING, name.split(".")[0])):
                self._by_spelling.setdefault(spelling, []).append(path)

    @property
    def paths(self) -> Sequence[str]:
        """The paths that can be found, sorted."""
        return self._paths

    def find(self, name: str) -> str | None:
        """Return the path that a name means; None if there is none or the choice is unclear."""
        return first_match(name, self.find_as_spelt)

    def find_as_spelt(self, name: str) -> str | None:
        """Return the path that a name means in the encoding in which it is given."""
        folders, last = _split(name)
        is_absolute = _is_absolute(name)
        for extent, key in (
            (_WHOLE, last),
            (_STEM, last),
            (_STEM, _stem(last)),
            (_BEGINNING, last),
        ):
            paths = self._by_spelling.get((extent, key), [])
            candidates = _best(folders, is_absolute, paths)
            if not candidates:
                continue
            if len(candidates) == 1:
                return candidates[0]
            candidate_folders = {_split(path)[0] for path in candidates}
            if len(candidate_folders) == 1 and extent != _BEGINNING:
                return min(candidates, key=self._rank)
            return None
        return None

    def _rank(self, path: str) -> tuple[int, str]:
        """Return a sorting key that puts the preferred extension first."""
        suffixes = self._suffixes or ()
        suffix = PurePosixPath(path).suffix.lower()
        rank = suffixes.index(suffix) if suffix in suffixes else len(suffixes)
        return rank, path


class ImageFolder:
    """Finds image files below a folder by the names that programs and checkpoints give them.

    Folders are listed when a name leads there, and all folders in them when nothing else helps.

    Args:
        recursive: Whether to look in folders that the name does not have.
        suffixes: Extensions of the files, the preferred one first.
    """

    def __init__(
        self, root: Path, recursive: bool = True, suffixes: Sequence[str] = IMAGE_SUFFIXES
    ) -> None:
        self.root = root
        self._recursive = recursive
        self._suffixes = suffixes
        self._folders: dict[str, NameIndex] = {}
        self._tree: NameIndex | None = None

    def find(self, name: str) -> Path | None:
        """Return the image called ``name``; None if there is none or the choice is unclear."""
        if (self.root / name).is_file():
            return self.root / name
        match = first_match(name, self._find_as_spelt)
        return None if match is None else self.root / match

    def has(self, name: str) -> bool:
        """Whether there is an image called ``name`` in the encoding in which that is given."""
        return (self.root / name).is_file() or self._find_as_spelt(name) is not None

    def nearest(self, name: str) -> str | None:
        """Return the image file whose name resembles a name that was not found most."""
        folder = PurePosixPath(normalized(name)).parent
        paths = self._folder(folder).paths
        if not paths and self._recursive:
            paths = self._whole_tree().paths
        return nearest_name(name, paths or self._folder(PurePosixPath()).paths)

    def _find_as_spelt(self, name: str) -> str | None:
        path = PurePosixPath(normalized(name))
        if path.is_absolute():
            match = self._folder(path.parent).find_as_spelt(path.as_posix())
            if match is not None:
                return match
        parts = [part for part in path.parts if part != "/"]
        for first in range(len(parts)):
            shorter = PurePosixPath(*parts[first:])
            match = self._folder(shorter.parent).find_as_spelt(shorter.as_posix())
            if match is not None:
                return match
        return self._whole_tree().find_as_spelt(name) if self._recursive else None

    def _folder(self, parent: PurePosixPath) -> NameIndex:
        key = parent.as_posix()
        if key not in self._folders:
            folder = self.root / parent
            files = folder.iterdir() if folder.is_dir() else ()
            paths = [(parent / path.name).as_posix() for path in files]
            self._folders[key] = NameIndex(paths, self._suffixes)
        return self._folders[key]

    def _whole_tree(self) -> NameIndex:
        """All images below the root."""
        if self._tree is None:
            files = self.root.rglob("*") if self.root.is_dir() else ()
            files = list(itertools.islice(files, _MAX_SEARCHED + 1))
            if len(files) > _MAX_SEARCHED:
                raise UserError(
                    f"{self.root} holds more than {_MAX_SEARCHED:,} files; name the folder of the "
                    "photographs with --images"
                )
            paths = [path.relative_to(self.root).as_posix() for path in files]
            self._tree = NameIndex(paths, self._suffixes)
        return self._tree


class ImagePlaces:
    """Folders in which image files are looked for one after the other."""

    def __init__(self, *folders: ImageFolder) -> None:
        self._folders = folders

    @property
    def root(self) -> Path:
        """The first folder, where the files belong."""
        return self._folders[0].root

    def find(self, name: str) -> Path | None:
        """Return the image called ``name`` in the first folder that has it; None without any."""
        paths = (folder.find(name) for folder in self._folders)
        return next((path for path in paths if path is not None), None)

    def find_all(self, names: Iterable[str]) -> dict[str, Path | None]:
        """Return the path of each name, or None.

        Where several names lead to one file it belongs to the one that is spelt like it; if there
        is none, to none of them.
        """
        paths = {name: self.find(name) for name in names}
        times = Counter(path for path in paths.values() if path is not None)
        for name, path in paths.items():
            if path is not None and times[path] > 1 and not _ends_with(path, name):
                paths[name] = None
        return paths

    def nearest(self, name: str) -> str | None:
        """Return the image file whose name resembles a name that was not found most."""
        names = (folder.nearest(name) for folder in self._folders)
        return nearest_name(name, [n for n in names if n is not None])


class CamerasByName(Generic[Named]):
    """Cameras, or other things with a ``name``, found by the names that other programs give them.

    Those of ``test`` are found by their exact names only: their last parts are often those of the
    training views.
    """

    def __init__(self, train: Sequence[Named], test: Sequence[Named] = ()) -> None:
        self._exact = {camera.name: camera for camera in (*train, *test)}
        self._train = {camera.name: camera for camera in train}
        self._index = NameIndex(self._train, suffixes=None)

    def __call__(self, name: str) -> Named | None:
        """Return the camera; None if there is none or the choice is unclear."""
        if name in self._exact:
            return self._exact[name]
        match = self._index.find(name)
        return None if match is None else self._train[match]

    def nearest(self, name: str) -> str | None:
        """Return the name of the camera that resembles a name which was not found most."""
        return nearest_name(name, self._index.paths)


def missing_images(
    names: Sequence[str],
    total: int,
    places: ImagePlaces,
    advice: str = "put them there or name the right folder with --images",
) -> UserError:
    """Error that reports all cameras without an image file.

    Args:
        places: Where they were looked for.
    """
    sample = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
    nearest = places.nearest(names[0])
    hint = (
        f"nearest to {names[0]} is {nearest}" if nearest else f"no file is called like {names[0]}"
    )
    return UserError(
        f"{len(names)} of {total} images are missing in {places.root} (cameras {sample}; {hint}); "
        f"{advice}"
    )


def unknown_names(
    names: Sequence[str], items: Mapping[str, Any] | Sequence[str], place: str, advice: str
) -> UserError:
    """Return the error for names in a list that match nothing."""
    nearest = nearest_name(names[0], items)
    hint = f"; nearest to {names[0]} is {nearest}" if nearest else ""
    sample = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
    return UserError(f"{place}: no such photographs: {sample}{hint}; {advice}")


def _on_error(encoding: str) -> str:
    return "surrogateescape" if encoding == "utf-8" else "strict"


def _is_text(name: str) -> bool:
    """Whether a name can be written as UTF-8, and printed."""
    return not any("\ud800" <= character <= "\udfff" for character in name) and name.isprintable()


def _key(name: str) -> str:
    """Return the normalised spelling of a name: composed characters, lower case."""
    return unicodedata.normalize("NFC", name.lower())


def _split(name: str) -> tuple[tuple[str, ...], str]:
    """Return the folders of a name, without ``.`` and ``..``, and its last part, as compared."""
    path = PurePosixPath(_key(normalized(name)))
    folders = tuple(part for part in path.parts[:-1] if part not in ("/", ".."))
    return folders, path.name


def _is_absolute(name: str) -> bool:
    """Whether a name begins at the root of a disk, or outside of the folder it is looked for in."""
    path = normalized(name)
    return path.startswith(("/", "../")) or _DRIVE.match(path) is not None


def _best(folders: tuple[str, ...], absolute: bool, paths: Sequence[str]) -> list[str]:
    """Choose from paths with the right last part those whose folders agree best with a name's.

    Args:
        absolute: Whether the name may have folders that do not exist here.
    """
    # Paths by the number of folders that they share with the name.
    agreeing: dict[int, list[str]] = {}
    others: dict[int, list[str]] = {}
    for path in paths:
        candidate, _ = _split(path)
        if candidate == folders:
            # More than the number of folders that any other path can share.
            agreeing.setdefault(len(folders) + 1, []).append(path)
            continue
        n_shared = _n_shared_folders(folders, candidate)
        if n_shared in (len(folders), len(candidate)):
            agreeing.setdefault(n_shared, []).append(path)
        elif absolute:
            others.setdefault(n_shared, []).append(path)
    group = agreeing or others
    return group[max(group)] if group else []


def _n_shared_folders(first: tuple[str, ...], second: tuple[str, ...]) -> int:
    """Return the number of equal folders, counted from the end."""
    n_shared = 0
    for a, b in zip(reversed(first), reversed(second), strict=False):
        if a != b:
            break
        n_shared += 1
    return n_shared


def _ends_with(path: Path, name: str) -> bool:
    """Whether a path ends as a name does."""
    name_parts = PurePosixPath(_key(normalized(name))).parts
    path_parts = PurePosixPath(_key(path.as_posix())).parts
    return path_parts[-len(name_parts) :] == name_parts


def _stem(name: str) -> str:
    """Return a name without the extension of an image."""
    path = PurePosixPath(name)
    suffixes = (*PHOTOGRAPH_SUFFIXES, *RAW_SUFFIXES)
    return path.stem if path.suffix.lower() in suffixes else name
