"""Logs: one JSON object per line on stderr, or coloured lines for a person.

Never prompts, outputs or tokens: events carry ids, counts and times.
"""

from __future__ import annotations

import logging
import sys
from typing import Final, Literal

import structlog
from structlog.typing import Processor

LogLevel = Literal["debug", "info", "warning", "error"]
# Tracebacks without local variables: those hold prompts and tokens.
_TRACEBACKS: Final = structlog.processors.ExceptionRenderer(
    structlog.tracebacks.ExceptionDictTransformer(show_locals=False)
)

LogStyle = Literal["json", "console"]


def configure_logging(*, style: LogStyle, level: LogLevel, service: str) -> None:
    """Route structlog and the standard library's loggers to stderr, from `level` on.

    Every line carries `service`. Called once, by a process's composition root.
    """
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        _named(service),
    ]
    last: list[Processor]
    if style == "json":
        last = [_TRACEBACKS, structlog.processors.JSONRenderer()]
    else:
        last = [
            structlog.dev.ConsoleRenderer(
                colors=sys.stderr.isatty(), exception_formatter=structlog.dev.plain_traceback
            )
        ]
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *last],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    structlog.configure(
        processors=[
            # A line below the level costs this one look.
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )


def _named(service: str) -> Processor:
    def add_service(
        logger: object, method: str, event: structlog.typing.EventDict
    ) -> structlog.typing.EventDict:
        event["service"] = service
        return event

    return add_service
