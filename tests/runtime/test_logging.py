"""What gets into the logs of a process."""

import json
import subprocess
import sys

import pytest

PROGRAM = """
import logging, structlog
from ampd.runtime.logging import configure_logging
configure_logging(style={style!r}, level="info", service="ampd-x")
log = structlog.get_logger("ampd.some.module")
log.debug("too_fine")
log.info("placed", session="s1", seconds=0.5)
logging.getLogger("redis").warning("of a library: %s", 7)
def answer(prompt):
    raise RuntimeError("broken")
try:
    answer("the user's secret")
except RuntimeError as error:
    log.error("call_failed", exc_info=error)
"""


def lines(style: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(style=style)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == ""
    return done.stderr


def test_json_lines() -> None:
    placed, library, failed = (json.loads(line) for line in lines("json").splitlines())
    assert {"event": "placed", "session": "s1", "seconds": 0.5}.items() <= placed.items()
    assert (placed["level"], placed["service"]) == ("info", "ampd-x")
    assert placed["logger"] == "ampd.some.module"
    assert placed["timestamp"].endswith("Z")
    assert (library["event"], library["logger"]) == ("of a library: 7", "redis")
    assert failed["exception"][0]["exc_type"] == "RuntimeError"


@pytest.mark.parametrize("style", ["json", "console"])
def test_tracebacks_hold_no_local_variables(style: str) -> None:
    text = lines(style)
    assert "broken" in text
    assert "user's secret" not in text.replace('answer("the user\'s secret")', "")
