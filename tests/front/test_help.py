"""Help: options in groups, and no traceback if its reader stops."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from rope_extend.cli.main import COMMANDS, command_parser

MOST_IN_A_GROUP = 16


@pytest.mark.parametrize("name", COMMANDS)
def test_no_group_of_options_is_long(name: str) -> None:
    parser = command_parser(name)
    sizes = {group.title: len(group._group_actions) for group in parser._action_groups}
    assert max(sizes.values()) <= MOST_IN_A_GROUP, sizes


@pytest.mark.parametrize("line", ["--help", "finetune --help", "completion bash"])
def test_a_reader_that_stops_is_no_error(line: str) -> None:
    """As in `rope-extend --help | head -1`."""
    reading, writing = os.pipe()
    os.close(reading)
    try:
        command = [sys.executable, "-m", "rope_extend", *line.split()]
        done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, check=False)
    finally:
        os.close(writing)
    assert "Traceback" not in done.stderr
