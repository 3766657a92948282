"""Signals that end a command."""

from __future__ import annotations

import os
import signal
import time

import pytest

from graphspec.cli.errors import guarded
from graphspec.cli.signals import Ended


def killed_by(number: signal.Signals) -> int:
    os.kill(os.getpid(), number)
    time.sleep(5)
    return 0


@pytest.mark.parametrize(
    ("number", "status", "said"), [(signal.SIGTERM, 143, "terminated"), (signal.SIGHUP, 129, "hung up")]
)
def test_a_signal_is_one_line_and_the_status_of_a_killed_command(
    number: signal.Signals, status: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert guarded(lambda: killed_by(number), debug=False) == status
    assert capsys.readouterr().err == f"{said}\n"
    assert signal.getsignal(number) is signal.SIG_DFL


def test_one_that_a_library_wraps_in_an_error_of_its_own_is_told_all_the_same(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def wrapped() -> int:
        try:
            return killed_by(signal.SIGTERM)
        except Ended as ended:
            raise RuntimeError("the library failed") from ended

    assert guarded(wrapped, debug=False) == 143
    assert capsys.readouterr().err == "terminated\n"


def test_a_signal_that_is_ignored_stays_ignored() -> None:
    """nohup graphspec build …"""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:

        def work() -> int:
            os.kill(os.getpid(), signal.SIGHUP)
            return 7

        assert guarded(work, debug=False) == 7
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
