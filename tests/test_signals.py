# SPDX-License-Identifier: Apache-2.0
"""Stop signals set a flag, the second Ctrl-C is immediate, handlers come back."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from gaussian_splatting.engine.stop_request import StopRequest

REPOSITORY = Path(__file__).resolve().parent.parent
posix_only = pytest.mark.skipif(sys.platform == "win32", reason="sends POSIX signals")


def test_nothing_is_requested_at_first():
    with StopRequest() as stop:
        assert stop.requested is None


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_first_signal_is_noted_by_name(name):
    with StopRequest() as stop:
        signal.raise_signal(getattr(signal, name))
        assert stop.requested == name


def test_second_interrupt_is_immediate_and_the_first_name_stays():
    with StopRequest() as stop:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        assert stop.requested == "SIGTERM"


def test_handlers_are_restored_even_after_an_error():
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def fail():
        with StopRequest():
            raise ValueError

    with pytest.raises(ValueError):
        fail()
    assert before == {number: signal.getsignal(number) for number in before}


def test_contexts_nest():
    with StopRequest() as outer:
        with StopRequest() as inner:
            signal.raise_signal(signal.SIGTERM)
        assert (outer.requested, inner.requested) == (None, "SIGTERM")
        signal.raise_signal(signal.SIGTERM)
        assert outer.requested == "SIGTERM"


def test_other_threads_leave_the_handlers_alone():
    before = signal.getsignal(signal.SIGINT)
    seen = []

    def work():
        with StopRequest() as stop:
            seen.append((stop.requested, signal.getsignal(signal.SIGINT)))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [(None, before)]


@posix_only
def test_process_finishes_its_iteration_and_leaves_cleanly():
    code = (
        "import time\n"
        "from gaussian_splatting.engine.stop_request import StopRequest\n"
        "with StopRequest() as stop:\n"
        "    print('ready', flush=True)\n"
        "    while stop.requested is None:\n"
        "        time.sleep(0.01)\n"
        "    print('saved after', stop.requested, flush=True)\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout.readline() == "ready\n"
    os.kill(child.pid, signal.SIGTERM)
    assert child.stdout.read() == "saved after SIGTERM\n"
    assert child.wait(timeout=20) == 0
