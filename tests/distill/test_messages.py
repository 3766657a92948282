"""Users' messages from a file of JSON lines."""

from __future__ import annotations

from pathlib import Path

import pytest

from graphspec.distill.messages import read_messages
from graphspec.errors import ConfigError


def test_both_forms_are_read_and_blank_lines_are_not(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(
        '{"prompt": "One"}\n\n{"messages": [{"role": "system", "content": "S"}, {"role": "user", "content": "Two"}]}\n'
    )
    assert read_messages(path) == ("One", "Two")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "is not JSON"),
        ("[]", "has no message"),
        ('{"prompt": 3}', "has no message"),
        ('{"prompt": " "}', "has no message"),
        pytest.param("[" * 100_000, "is not JSON", id="nested"),
        ('{"prompt": "a \\ud800"}', "holds half a character"),
        ('{"messages": [{"role": "assistant", "content": "x"}]}', "has no message"),
    ],
)
def test_a_line_without_a_message_is_named(tmp_path: Path, line: str, said: str) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "One"}\n' + line + "\n")
    with pytest.raises(ConfigError, match=f"line 2, {said}"):
        read_messages(path)


def test_lines_end_at_line_feeds_only(tmp_path: Path) -> None:
    """JSON may hold other line ends as they are, and files may begin with a mark of their encoding."""
    path = tmp_path / "p.jsonl"
    path.write_bytes('\ufeff{"prompt": "One\u2028two\x85three"}\r\n{"prompt": "\U0001f41d"}'.encode())
    assert read_messages(path) == ("One\u2028two\x85three", "\U0001f41d")


def test_an_empty_or_missing_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(ConfigError, match="holds no messages"):
        read_messages(tmp_path / "empty")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_messages(tmp_path / "missing")
