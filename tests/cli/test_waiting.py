"""Idle threads of torch sleep, unless the environment says otherwise."""

import os
import subprocess
import sys

import pytest

CODE = """
import sys
{before}
from midstep.cli.waiting import sleep_while_waiting
sleep_while_waiting()
import os
print(os.environ.get("OMP_WAIT_POLICY"))
"""


@pytest.mark.parametrize(
    ("given", "before", "found"),
    [
        (None, "", "passive"),
        ("active", "", "active"),
        (None, "sys.modules['torch'] = None", "None"),  # as if it had been loaded
    ],
)
def test_threads_sleep_where_nothing_else_was_said_in_time(
    given: str | None, before: str, found: str
) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "OMP_WAIT_POLICY"}
    if given is not None:
        environment["OMP_WAIT_POLICY"] = given
    process = subprocess.run(
        [sys.executable, "-c", CODE.format(before=before)],
        capture_output=True,
        text=True,
        check=True,
        env=environment,
    )
    assert process.stdout.strip() == found
