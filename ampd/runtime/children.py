"""Commands that must not outlive the process that started them."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Final

# prctl acts on the process that calls it and lasts over exec, hence this small step in between
# (a hook between fork and exec is not safe in a process with threads); only Linux knows it.
_EXEC_TIED: Final = """
import ctypes, os, sys
parent, signal, command = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
if sys.platform == "linux":
    PR_SET_PDEATHSIG = 1
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal)
    if os.getppid() != parent:
        sys.exit(1)
os.execv(command[0], command)
"""


def tied_to_this_process(command: Sequence[str], death_signal: int) -> list[str]:
    """The command line that runs `command` (an absolute path first) and, on Linux, has the
    kernel send it `death_signal` when this process ends, however it ends."""
    step = (sys.executable, "-I", "-S", "-c", _EXEC_TIED)
    return [*step, str(os.getpid()), str(death_signal), *command]
