# SPDX-License-Identifier: Apache-2.0
"""Messages, tables and progress on terminals, in pipes and in the log file."""

import errno
import io
import re

import pytest

from sugar_utils.console import Console, Pace
from sugar_utils.errors import UserError

STAMP = re.compile(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d ")


class Clock:
    """Seconds that pass only when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def log_lines(path) -> list[str]:
    lines = path.read_text(encoding="utf-8").splitlines()
    assert all(STAMP.match(line) for line in lines)
    return [STAMP.sub("", line) for line in lines]


def test_brackets_and_emoji_codes_are_printed_as_they_are(tmp_path):
    stream = io.StringIO()
    with Console(tmp_path / "log.txt", stream=stream) as console:
        console.info("reading scans/[red]/fox[/red] :smile: [1, 2]")
        console.warn("skipping [bold]x.pt")
        console.table("Settings [x]", [("scene", "[/nope]"), ("n", 3), ("none", None)])
    text = stream.getvalue()
    assert "scans/[red]/fox[/red] :smile: [1, 2]\n" in text
    assert "warning: skipping [bold]x.pt\n" in text
    assert "Settings [x]" in text
    assert "[/nope]" in text


def test_long_lines_are_not_broken_in_pipes():
    stream = io.StringIO()
    Console(stream=stream).info("path " + "x" * 300)
    assert stream.getvalue() == "path " + "x" * 300 + "\n"


def test_log_has_time_stamps_no_colours_and_is_continued(tmp_path):
    path = tmp_path / "run" / "log.txt"
    for message in ("first", "résumé → [x]\nsecond line"):
        with Console(path, stream=io.StringIO(), terminal=True) as console:
            console.info(message)
            console.warn("careful")
    assert log_lines(path) == [
        "first",
        "warning: careful",
        r"résumé → [x]\nsecond line",
        "warning: careful",
    ]


def test_names_of_files_cannot_forge_lines_or_move_the_cursor(tmp_path):
    forged = "fox\x1b[2J\nwarning: disk is full\r\x9b1A\u2028.png"
    spelled = r"fox\x1b[2J\nwarning: disk is full\r\x9b1A\u2028.png"
    for terminal in (False, True):
        stream = io.StringIO()
        with Console(tmp_path / "log.txt", stream=stream, terminal=terminal) as console:
            console.info(forged)
            console.warn(forged)
            console.table(forged, [(forged, forged)])
            with console.progress(forged, 1, 2) as progress:
                progress.update(2, fields={"view": forged})
        if not terminal:
            assert stream.getvalue().count("\n") == 5
        assert "\x1b[2J" not in stream.getvalue()
        assert spelled in stream.getvalue()
    lines = log_lines(tmp_path / "log.txt")
    assert len(lines) == 10
    assert all(spelled in line for line in lines)


class FullDisk(io.StringIO):
    """Takes nothing."""

    def write(self, text):
        raise OSError(errno.ENOSPC, "No space left on device")


def test_full_output_is_said_once_and_the_log_goes_on(tmp_path, capsys):
    with Console(tmp_path / "log.txt", stream=FullDisk()) as console:
        for message in ("first", "second"):
            console.info(message)
    assert capsys.readouterr().err == (
        "warning: the output is not continued: No space left on device\n"
    )
    assert log_lines(tmp_path / "log.txt") == [
        "warning: the output is not continued: No space left on device",
        "first",
        "second",
    ]


def test_reader_that_left_is_reported_to_the_caller():
    class Left(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        Console(stream=Left()).info("x")


def test_table_is_drawn_on_terminals_and_aligned_in_the_log(tmp_path):
    stream = io.StringIO()
    with Console(tmp_path / "log.txt", stream=stream, terminal=True) as console:
        console.table("Settings", [("seed", 0), ("scene_path", "a/[b]")])
    assert "\x1b[" in stream.getvalue()
    assert "a/[b]" in stream.getvalue()
    assert log_lines(tmp_path / "log.txt") == [
        "Settings",
        "  seed        0",
        "  scene_path  a/[b]",
    ]


def test_a_silent_console_is_silent_in_a_notebook(monkeypatch, capsys):
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    shown = []
    monkeypatch.setattr("rich.jupyter.display", lambda *parts: shown.append(parts))
    console = Console.silent()
    console.headline("stage 1")
    console.warn("w")
    with console.progress("loop", 1, 2) as progress:
        progress.update(2)
    assert not console.rich.is_jupyter
    assert not shown
    assert capsys.readouterr().out == ""


def test_plain_progress_prints_the_first_the_last_and_one_line_per_interval(tmp_path):
    stream, clock = io.StringIO(), Clock()
    console = Console(tmp_path / "log.txt", stream=stream, pace=Pace(10, clock))
    with console.progress("coarse", 7001, 7100) as progress:
        for iteration in range(7001, 7101):
            clock.now += 0.25
            progress.update(iteration, fields={"loss": f"{1 / iteration:.6f}", "[n]": "5"})
    lines = stream.getvalue().splitlines()
    assert lines[0] == "coarse 7001/7100 loss 0.000143 [n] 5"
    assert lines[1] == "coarse 7041/7100 4.0 it/s eta 0:15 loss 0.000142 [n] 5"
    assert len(lines) == 4
    assert lines[-1] == "coarse 7100/7100 4.0 it/s eta 0:00 loss 0.000141 [n] 5"
    assert log_lines(tmp_path / "log.txt") == lines


def test_due_tells_when_fields_are_worth_computing():
    clock = Clock()
    console = Console(stream=io.StringIO(), pace=Pace(10, clock))
    with console.progress("coarse", 1, 100) as progress:
        assert progress.due
        progress.update(1, fields={"loss": "1"})
        assert not progress.due
        clock.now += 11
        assert progress.due


def test_interrupted_progress_still_shows_where_it_stopped():
    stream, clock = io.StringIO(), Clock()
    console = Console(stream=stream, pace=Pace(10, clock))

    def stopped_loop():
        with console.progress("coarse", 1, 100) as progress:
            for iteration in (1, 2, 3):
                clock.now += 1
                progress.update(iteration)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stopped_loop()
    assert stream.getvalue().splitlines()[-1].startswith("coarse 3/100 1.0 it/s")


def test_slow_loops_and_long_waits_are_readable():
    stream, clock = io.StringIO(), Clock()
    console = Console(stream=stream, pace=Pace(0, clock))
    with console.progress("refine", 1, 2001) as progress:
        progress.update(0)
        clock.now += 4.0
        progress.update(1)
    assert "refine 1/2001 4.0 s/it eta 2:13:20" in stream.getvalue()


def test_what_does_not_say_how_far_it_is_is_timed(tmp_path):
    stream, clock = io.StringIO(), Clock()
    console = Console(tmp_path / "log.txt", stream=stream, pace=Pace(10, clock))
    with console.waiting("background: Poisson") as show:
        for _ in range(130):
            clock.now += 0.5
            show({"memory": "1.20 GiB"})
    lines = stream.getvalue().splitlines()
    assert lines[0] == "background: Poisson 0:10 so far memory 1.20 GiB"
    assert lines[-1] == "background: Poisson 1:00 so far memory 1.20 GiB"
    assert len(lines) == 6
    assert log_lines(tmp_path / "log.txt") == lines


def test_terminals_see_at_once_what_goes_on():
    stream = io.StringIO()
    with Console(stream=stream, terminal=True) as console:
        with console.waiting("[background]: Poisson") as show:
            show({"memory": "1.20 GiB"})
        console.info("done")
    shown = stream.getvalue()
    assert all(words in shown for words in ("[background]: Poisson", "1.20 GiB", "done"))


def test_terminal_progress_draws_a_bar_with_fields_and_messages_above(tmp_path):
    stream, clock = io.StringIO(), Clock()
    with Console(
        tmp_path / "log.txt", stream=stream, terminal=True, pace=Pace(clock=clock)
    ) as console:
        assert console.is_terminal
        with console.progress("coarse [x]", 1, 50) as progress:
            for iteration in range(1, 51):
                clock.now += 0.5
                progress.update(iteration, fields={"loss": "0.0431", "gaussians": "[12]"})
            console.info("saved 50.pt")
    text = stream.getvalue()
    assert "coarse [x]" in text
    assert "50/50" in text
    assert "2.0 it/s" in text
    assert "loss 0.0431  gaussians [12]" in text
    assert "saved 50.pt" in text
    assert "\x1b" not in (tmp_path / "log.txt").read_text()


def test_narrow_code_page_does_not_raise():
    buffer = io.BytesIO()
    stream = io.TextIOWrapper(buffer, encoding="cp1252")
    Console(stream=stream).info("0 → 1")
    stream.flush()
    assert buffer.getvalue().rstrip() == b"0 ? 1"


def test_log_that_cannot_be_opened_is_a_user_error(tmp_path):
    with pytest.raises(UserError, match="is a folder, where a file is needed"):
        Console(tmp_path, stream=io.StringIO())


def test_log_that_fills_the_disk_is_given_up_with_one_warning(tmp_path, monkeypatch):
    stream = io.StringIO()
    console = Console(tmp_path / "log.txt", stream=stream)

    class Full(io.StringIO):
        name = "log.txt"

        def write(self, text):
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(console, "_log", Full())
    console.info("one")
    console.info("two")
    assert stream.getvalue().splitlines() == [
        "one",
        "warning: log.txt is not continued: No space left on device",
        "two",
    ]


def test_a_quiet_console_prints_headlines_warnings_and_tenths_of_a_loop(tmp_path):
    stream, clock = io.StringIO(), Clock()
    log = tmp_path / "log.txt"
    with Console(log, stream=stream, pace=Pace(1, clock), verbose=False) as console:
        console.headline("stage 1 of 2: coarse")
        console.table("settings", [("seed", 0)])
        console.info("saved 100.pt")
        console.warn("few photographs")
        with console.progress("coarse", 1, 1000) as progress:
            for iteration in range(1, 1001):
                clock.now += 0.5
                progress.update(iteration)
    lines = stream.getvalue().splitlines()
    assert lines[:2] == ["stage 1 of 2: coarse", "warning: few photographs"]
    assert len(lines) == 2 + 10
    done = [int(line.split()[1].removesuffix("/1000")) for line in lines[2:]]
    assert done == pytest.approx(range(100, 1001, 100), abs=2)
    logged = log_lines(log)
    assert "saved 100.pt" in logged
    assert "  seed  0" in logged
    assert len([line for line in logged if line.startswith("coarse ")]) > 400


def test_a_rate_needs_two_iterations_and_an_end_is_printed_once():
    stream, clock = io.StringIO(), Clock()
    console = Console(stream=stream, pace=Pace(0, clock))
    with console.progress("photographs", 1, 135) as progress:
        progress.update(135)
        for _ in range(240):
            clock.now += 1.0
            progress.update(135)
    assert stream.getvalue() == "photographs 135/135\n"


def test_a_short_stall_does_not_upset_the_time_that_is_left():
    stream, clock = io.StringIO(), Clock()
    console = Console(stream=stream, pace=Pace(0, clock))
    with console.progress("coarse", 1, 2000) as progress:
        for iteration in range(1, 1501):
            # An evaluation stops the loop for 20 seconds.
            clock.now += 20.0 if iteration == 1000 else 0.1
            progress.update(iteration)
    etas = [line.rsplit("eta ", 1)[1] for line in stream.getvalue().splitlines()[1:]]
    seconds = [int(m) * 60 + int(s) for m, s in (eta.split(":") for eta in etas)]
    assert seconds[997] == pytest.approx(100, abs=2)
    assert max(seconds[998:]) < 250
