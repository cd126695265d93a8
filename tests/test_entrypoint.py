# SPDX-License-Identifier: Apache-2.0
"""The frame around entry points: exit codes, one line, Ctrl-C at any moment, broken outputs."""

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from sugar_utils.entrypoint import run_main
from sugar_utils.errors import TrainingError, UserError
from tests.support.repository import entry_points, name_of, production_files

REPOSITORY = Path(__file__).resolve().parent.parent
FULL = Path("/dev/full")
needs_full_device = pytest.mark.skipif(not FULL.exists(), reason="needs /dev/full")

TERMINATED = """
import os, signal
from sugar_utils.libraries import load_pycolmap
{preparation}
os.kill(os.getpid(), signal.SIGTERM)
signal.pause()
"""

INTERRUPTED_IMPORTS = """
import runpy, sys

class Interrupts:
    def find_spec(self, name, *_):
        if name == "torch":
            raise KeyboardInterrupt

sys.meta_path.insert(0, Interrupts())
for script in sys.argv[1:]:
    sys.argv = [script, "--help"]
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as leaving:
        print(script, leaving.code, file=sys.stderr)
"""

IMPORTS = """
import importlib, sys
for module in sys.argv[1:]:
    importlib.import_module(module)
    slow = {"torch", "numpy", "warp", "rich", "pycolmap", "PIL.Image"} & set(sys.modules)
    print(module, *slow)
"""

FRAMED = """
import signal, sys
from sugar_utils.entrypoint import run_main

# Whoever starts the tests in the background has Ctrl-C ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)

def main():
{body}

sys.exit(run_main(main))
"""


def run_code(code: str, *words: object, **settings) -> subprocess.CompletedProcess:
    """Run code in a process of its own, from the repository."""
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, words)],
        cwd=REPOSITORY,
        stdout=settings.pop("stdout", subprocess.PIPE),
        stderr=settings.pop("stderr", subprocess.PIPE),
        text=True,
        timeout=60,
        **settings,
    )


def framed(body: str, **settings) -> subprocess.CompletedProcess:
    """Run lines of code as the body of an entry point."""
    indented = "\n".join(f"    {line}" for line in body.splitlines())
    return run_code(FRAMED.format(body=indented), **settings)


def test_run_main_returns_codes(capsys):
    assert run_main(lambda: None) == 0
    assert run_main(lambda: 4) == 4

    def fail(error):
        def main():
            raise error

        return main

    assert run_main(fail(UserError("no images in [x]; pass -s"))) == 2
    assert capsys.readouterr().err == "error: no images in [x]; pass -s\n"
    assert run_main(fail(TrainingError("loss is nan"))) == 3
    assert run_main(fail(KeyboardInterrupt())) == 130
    with pytest.raises(ZeroDivisionError):
        run_main(fail(ZeroDivisionError()))


@pytest.mark.skipif(sys.platform == "win32", reason="closing a pipe early is a POSIX habit")
def test_reader_that_leaves_early_causes_no_traceback():
    code = (
        "import sys\n"
        "from sugar_utils.entrypoint import run_main\n"
        "def main():\n"
        "    for i in range(200_000):\n"
        "        print('line', i)\n"
        "sys.exit(run_main(main))\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    child.stdout.readline()
    child.stdout.close()
    assert child.stderr.read() == b""
    assert child.wait(timeout=20) == 141


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGTERM between processes")
@pytest.mark.parametrize("preparation", ["", "load_pycolmap()", "load_pycolmap().Reconstruction()"])
def test_a_request_to_terminate_ends_in_one_line_whatever_is_loaded(preparation):
    done = framed(TERMINATED.format(preparation=preparation))
    assert (done.returncode, done.stderr) == (143, "stopped by SIGTERM\n")


def test_pycolmap_is_loaded_in_one_place():
    found = []
    for path in production_files():
        # Imports for the type checker alone are not executed.
        text = path.read_text("utf-8").replace("if TYPE_CHECKING:\n    import pycolmap", "")
        if "import pycolmap" in text:
            found.append(path.name)
    assert found == ["libraries.py"]


def test_interrupt_while_an_entry_point_loads_is_one_line():
    scripts = [str(path) for path in entry_points()]
    done = run_code(INTERRUPTED_IMPORTS, *scripts)
    expected = [line for script in scripts for line in ("stopped by Ctrl-C", f"{script} 130")]
    assert (done.returncode, done.stderr.splitlines()) == (0, expected)


@pytest.mark.parametrize("error", ["ImportError", "RuntimeError", "UserError"])
def test_interrupt_that_a_native_module_turned_into_another_error_is_one_line(error):
    done = framed(
        "import signal\n"
        "from sugar_utils.errors import UserError\n"
        "try:\n    signal.raise_signal(signal.SIGINT)\n"
        f"except BaseException:\n    pass\nraise {error}('no backend')"
    )
    assert (done.returncode, done.stderr) == (130, "stopped by Ctrl-C\n")


def test_the_handler_of_interrupts_comes_back():
    before = signal.getsignal(signal.SIGINT)
    assert run_main(lambda: None) == 0
    assert signal.getsignal(signal.SIGINT) is before


def test_a_failed_import_is_a_defect():
    done = framed("import no_such_module")
    assert done.returncode == 1
    assert "ModuleNotFoundError" in done.stderr


def test_entry_points_load_what_is_slow_inside_the_frame():
    modules = [name_of(path)[:-3].replace("/", ".") for path in entry_points()]
    done = run_code(IMPORTS, *modules)
    assert (done.stderr, done.stdout.splitlines()) == ("", modules)


def test_names_cannot_forge_lines(capsys):
    def main():
        raise UserError("a\x1b[31m\nwarning: b\x9b\u202e\udcff is missing in Stra\u00dfe")

    assert run_main(main) == 2
    expected = r"error: a\x1b[31m\nwarning: b\x9b\u202e\udcff is missing in Stra"
    assert capsys.readouterr().err == expected + "\u00dfe\n"


def test_warnings_of_libraries_are_one_line_each_and_said_once():
    done = framed(
        "import warnings\n"
        "for _ in range(2):\n"
        "    warnings.warn('too\\nmany' + chr(27))\n"
        "    warnings.warn('too many' + chr(27), RuntimeWarning)"
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "warning: too many\\x1b\n", "")


def test_warnings_can_still_be_made_errors():
    assert run_main(lambda: None) == 0
    done = framed("import warnings\nwarnings.simplefilter('error')\nwarnings.warn('x')")
    assert "UserWarning: x" in done.stderr


@needs_full_device
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("n_lines", [1, 20_000])
def test_full_output_is_one_line_and_no_success(n_lines, unbuffered):
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    with FULL.open("w") as full:
        body = f"for i in range({n_lines}):\n    print(i)"
        done = framed(body, stdout=full, env=environment)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("error: cannot write: No space left")


@needs_full_device
def test_help_that_nobody_gets_is_no_success():
    with FULL.open("w") as full:
        body = "from sugar_utils.flags import Parser\nParser().parse_args(['--help'])"
        done = framed(body, stdout=full, env={**os.environ, "PYTHONUNBUFFERED": ""})
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)


@needs_full_device
def test_full_error_output_keeps_the_exit_code():
    with FULL.open("w") as full:
        done = framed("from sugar_utils.errors import UserError\nraise UserError('x')", stderr=full)
    assert done.returncode == 2


def closing(*numbers: int) -> dict:
    """Settings of a process that starts with these streams closed."""
    return {"preexec_fn": lambda: [os.close(number) for number in numbers]}


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such way to close a stream")
@pytest.mark.parametrize("numbers", [(1,), (2,), (0, 1, 2)])
def test_closed_streams_take_no_part_in_other_files(numbers, tmp_path):
    path = tmp_path / "log.txt"
    done = framed(
        f"import os\nlog = open({str(path)!r}, 'w')\nprint('out')\n"
        "os.write(1, b'native')\nos.write(2, b'native')\n"
        "print('err', file=sys.stderr)\nlog.write('log')\nlog.close()",
        **closing(*numbers),
    )
    assert done.returncode == 0
    assert path.read_text() == "log"
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        MemoryError("std::bad_alloc"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: 4 bytes\nat x"),
    ],
)
def test_lack_of_memory_is_one_line(error, capsys):
    def main():
        raise error

    assert run_main(main) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: out of memory")
    assert "close other programs" in err
    assert err.count("\n") == 1


def test_other_runtime_errors_are_defects():
    def main():
        raise RuntimeError("shapes differ")

    with pytest.raises(RuntimeError, match="shapes differ"):
        run_main(main)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(errno.ENAMETOOLONG, "File name too long", "x" * 300), "choose a shorter name"),
        (OSError(errno.EROFS, "Read-only file system", "out"), "choose another place"),
        (PermissionError(errno.EACCES, "Permission denied", "a\nb"), r"a\nb: Permission denied"),
    ],
)
def test_files_that_the_system_refuses_are_one_line(error, words, capsys):
    def main():
        raise error

    assert run_main(main) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: cannot use ")
    assert words in err
    assert err.count("\n") == 1


def test_a_file_that_vanished_meanwhile_is_one_line(capsys):
    def main():
        raise FileNotFoundError(errno.ENOENT, "No such file", "x")

    assert run_main(main) == 2
    assert capsys.readouterr().err.startswith("error: cannot use x: No such file; it was moved or")


def test_a_missing_thing_without_a_name_is_a_defect():
    def main():
        raise FileNotFoundError(errno.ENOENT, "No such file")

    with pytest.raises(FileNotFoundError):
        run_main(main)
