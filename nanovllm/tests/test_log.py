"""LineHandler on standard error: a reader that does not read, and the progress of a load."""

import logging
import os

import pytest

from .. import LLM, log
from .testing.engines import OPTIONS
from .testing.processes import Terminal


def test_line_is_dropped_if_nobody_reads_standard_error(monkeypatch):
    reading, writing = os.pipe()
    with os.fdopen(reading), os.fdopen(writing, "w") as pipe:
        monkeypatch.setattr("sys.stderr", pipe)
        for i in range(3000):  # a pipe holds 64 KiB
            log.LineHandler().emit(logging.makeLogRecord({"msg": f"{i} {'x' * 100}"}))
        assert os.read(reading, 1 << 20).startswith(b"0 xxx")


@pytest.mark.parametrize("level", [logging.INFO, logging.WARNING])
def test_load_into_a_log_file_prints_lines(checkpoint, monkeypatch, caplog, level):
    monkeypatch.setattr(log, "LINE_INTERVAL_SECONDS", 0.0)
    caplog.set_level(level, log.logger.name)
    LLM(checkpoint, **OPTIONS)
    lines = [record.getMessage() for record in caplog.records]
    assert (lines[:1] == ["loading weights: 0%"]) == (level == logging.INFO) and lines == sorted(lines, key=len)


@pytest.mark.parametrize("level", [logging.INFO, logging.WARNING])
def test_load_in_a_terminal_shows_a_bar(checkpoint, monkeypatch, caplog, level):
    monkeypatch.setattr("sys.stderr", terminal := Terminal())
    monkeypatch.setattr(log, "BAR_DELAY_SECONDS", 0.0)
    caplog.set_level(level, log.logger.name)
    LLM(checkpoint, **OPTIONS)
    assert ("\rloading weights: " in terminal.getvalue()) == (level == logging.INFO) and caplog.records == []


def test_short_load_is_silent(checkpoint, capfd):
    LLM(checkpoint, **OPTIONS)
    assert capfd.readouterr().err == ""
