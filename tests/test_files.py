# SPDX-License-Identifier: Apache-2.0
"""Atomic output files, their errors, and the clean-up after killed processes."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sugar_utils import files
from sugar_utils.errors import UserError, reason_of
from sugar_utils.files import (
    atomic_path,
    check_writable,
    fingerprint,
    process_is_alive,
    read_json,
    remove_stale_temporaries,
    temporary_path,
    write_json_atomic,
    write_text_atomic,
)

REPOSITORY = Path(__file__).resolve().parent.parent


def test_file_appears_under_its_name_with_parents_created(tmp_path):
    path = tmp_path / "a" / "b" / "points.ply"
    with atomic_path(path) as temporary:
        assert temporary.parent == path.parent
        assert temporary.name.startswith(f"points.ply.tmp-{os.getpid()}")
        assert temporary.suffix == ".ply"
        temporary.write_bytes(b"ply")
        assert not path.exists()
    assert path.read_bytes() == b"ply"
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("error", [ValueError("bad"), KeyboardInterrupt()])
def test_exception_leaves_the_old_file_and_no_temporary(tmp_path, error):
    path = tmp_path / "7000.pt"
    path.write_bytes(b"old")

    def write():
        with atomic_path(path) as temporary:
            temporary.write_bytes(b"half")
            raise error

    with pytest.raises(type(error)):
        write()
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_full_disk_is_one_line_with_path_and_cause(tmp_path, monkeypatch):
    def refuse(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", refuse)
    path = tmp_path / "7000.pt"
    with pytest.raises(UserError, match="No space left") as caught:
        write_text_atomic(path, "x")
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(sys.platform == "win32", reason="resource limits are a POSIX matter")
def test_real_write_limit_is_reported_as_a_user_error(tmp_path):
    code = (
        "import resource, sys\n"
        "from sugar_utils.errors import UserError\n"
        "from sugar_utils.files import write_text_atomic\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "try:\n"
        "    write_text_atomic(sys.argv[1], 'x' * 5000)\n"
        "except UserError as error:\n"
        "    print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "big.txt")],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "big.txt" in done.stdout
    assert "too large" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_oserror_about_another_file_is_not_blamed_on_the_output(tmp_path):
    with pytest.raises(FileNotFoundError), atomic_path(tmp_path / "out.bin") as temporary:
        temporary.write_bytes((tmp_path / "input.bin").read_bytes())


def test_parent_that_is_a_file_is_a_user_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot create the folder"):
        write_text_atomic(tmp_path / "file" / "x.txt", "x")
    with pytest.raises(UserError, match="cannot create the folder"):
        check_writable(tmp_path / "file")


def test_check_writable_creates_and_leaves_nothing_inside(tmp_path):
    directory = check_writable(tmp_path / "new" / "run")
    assert directory.is_dir()
    assert list(directory.iterdir()) == []


def test_json_round_trip_with_paths_and_unicode(tmp_path):
    path = tmp_path / "run.json"
    write_json_atomic(path, {"scene": Path("Gärten"), "values": [1, 2.5, None, True]})
    assert read_json(path) == {"scene": "Gärten", "values": [1, 2.5, None, True]}
    assert path.read_bytes().endswith(b"}\n")


def test_json_refuses_what_it_cannot_express_and_keeps_the_old_file(tmp_path):
    path = tmp_path / "run.json"
    write_json_atomic(path, {"a": 1})
    with pytest.raises(TypeError):
        write_json_atomic(path, {"a": object()})
    assert read_json(path) == {"a": 1}


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16-le", "utf-16-be"])
@pytest.mark.parametrize("others", [(), ("utf-8", "gbk")])
def test_json_may_begin_with_the_mark_of_its_encoding(tmp_path, encoding, others):
    mark = "" if encoding == "utf-8-sig" else "\ufeff"
    (tmp_path / "a.json").write_bytes(f'{mark}{{"a": "Größe"}}'.encode(encoding))
    assert read_json(tmp_path / "a.json", others) == {"a": "Größe"}


def test_a_path_of_windows_in_json_is_explained(tmp_path):
    path = tmp_path / "a.json"
    path.write_text('{"scene": "C:\\Users\\me"}')
    with pytest.raises(UserError, match=r'begins an escape in "..."; write C:/... or C:\\\\\.\.\.'):
        read_json(path)


def test_reasons_of_errors_are_one_line_and_say_something():
    assert reason_of(KeyError("cameras")) == "no entry 'cameras'"
    assert reason_of(ValueError("a\n  b")) == "a b"
    assert reason_of(EOFError()) == "EOFError"


def test_broken_json_is_located(tmp_path):
    path = tmp_path / "cameras.json"
    path.write_text('{"a": 1,\n "b": }')
    with pytest.raises(UserError, match=r"cameras.json, line 2, column"):
        read_json(path)
    path.write_bytes(b"\xff\xfe{")
    with pytest.raises(UserError, match="not a UTF-8"):
        read_json(path)
    with pytest.raises(UserError, match="cannot read"):
        read_json(tmp_path / "absent.json")


def test_temporaries_of_dead_processes_are_removed_and_live_ones_kept(tmp_path):
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    child.wait()
    dead = tmp_path / f"8000.pt.tmp-{child.pid}.pt"
    own = temporary_path(tmp_path / "9000.pt")
    sleeper = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    live = tmp_path / f"log.txt.tmp-{sleeper.pid}.txt"
    other = tmp_path / "notes.tmp-abc"
    final = tmp_path / "7000.pt"
    for path in (dead, own, live, other, final):
        path.write_bytes(b"x")
    removed = remove_stale_temporaries(tmp_path)
    sleeper.communicate(b"\n")
    assert removed == sorted([dead, own])
    assert sorted(tmp_path.iterdir()) == sorted([live, other, final])


def test_temporaries_below_a_folder_are_removed_when_asked(tmp_path):
    stale = tmp_path / "iteration_7000" / "point_cloud.ply.tmp-1048577000.ply"
    stale.parent.mkdir()
    stale.write_bytes(b"x")
    assert remove_stale_temporaries(tmp_path) == []
    assert remove_stale_temporaries(tmp_path, nested=True) == [stale]
    assert remove_stale_temporaries(tmp_path / "absent", nested=True) == []


def test_a_write_removes_what_killed_processes_left_of_the_same_file(tmp_path):
    path = tmp_path / "a[1].ply"
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    child.wait()
    dead = tmp_path / f"a[1].ply.tmp-{child.pid}.ply"
    live = tmp_path / f"a[1].ply.tmp-{os.getppid()}.ply"
    other = tmp_path / f"b.ply.tmp-{child.pid}.ply"
    for left in (dead, live, other):
        left.write_bytes(b"half")
    write_text_atomic(path, "whole")
    assert sorted(tmp_path.iterdir()) == sorted([path, live, other])


def test_liveness_of_processes():
    assert process_is_alive(os.getpid())
    assert not process_is_alive(0)
    assert not process_is_alive(2**40)


def test_a_fingerprint_follows_the_content_and_not_the_place(tmp_path):
    first, second = tmp_path / "a.bin", tmp_path / "b.bin"
    first.write_bytes(b"mesh")
    second.write_bytes(b"mesh")
    assert fingerprint(first) == fingerprint(second)
    second.write_bytes(b"nesh")
    assert fingerprint(first) != fingerprint(second)


def test_a_fingerprint_of_a_large_file_sees_its_end_and_its_size(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "FINGERPRINT_BLOCKS", 2)
    path = tmp_path / "large.bin"
    found = set()
    for length, last in ((5 << 20, 0), (5 << 20, 1), ((5 << 20) + 1, 0)):
        path.write_bytes(bytes(length - 1) + bytes([last]))
        found.add(fingerprint(path))
    assert len(found) == 3
