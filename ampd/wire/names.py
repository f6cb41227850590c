"""Checks of the names in requests: ids, page sizes, labels, the tenant."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Final

from ampd.core.errors import invalid_field

MAX_NAME_CHARS: Final = 64
MAX_LABELS: Final = 16
MAX_PAGE_SIZE: Final = 1000
TENANT_KEY: Final = "ampd-tenant"
DEFAULT_TENANT: Final = "default"

_VISIBLE_ASCII: Final = re.compile(r"[!-~]+")
_TENANT: Final = re.compile(r"[A-Za-z0-9._-]+")


def required_id(value: str, path: str) -> str:
    """1 to 64 visible ASCII characters, no spaces; else AmpdError INVALID_FIELD `path`."""
    if not value:
        raise invalid_field(path, "required")
    return optional_id(value, path)


def is_id(value: str) -> bool:
    """1 to 64 visible ASCII characters, no spaces."""
    return 0 < len(value) <= MAX_NAME_CHARS and _VISIBLE_ASCII.fullmatch(value) is not None


def optional_id(value: str, path: str) -> str:
    """The same, or empty for none."""
    if value and not is_id(value):
        raise invalid_field(
            path, f"at most {MAX_NAME_CHARS} visible ASCII characters without spaces"
        )
    return value


def short_text(value: str, path: str, *, max_chars: int = MAX_NAME_CHARS) -> str:
    """Any text of at most `max_chars` characters; else AmpdError INVALID_FIELD `path`."""
    if len(value) > max_chars:
        raise invalid_field(path, f"{len(value)} characters, at most {max_chars} are allowed")
    return value


def page_size(value: int, *, default: int) -> int:
    """0 as the default, at most 1000; else AmpdError INVALID_FIELD `page_size`."""
    if value > MAX_PAGE_SIZE:
        raise invalid_field("page_size", f"{value} is beyond the range 0 to {MAX_PAGE_SIZE}")
    return value or default


def labels_from_proto(labels: Mapping[str, str], path: str = "labels") -> dict[str, str]:
    """At most 16 labels of at most 64 characters each; else AmpdError INVALID_FIELD."""
    if len(labels) > MAX_LABELS:
        raise invalid_field(path, f"{len(labels)} labels, at most {MAX_LABELS} are allowed")
    for key, value in labels.items():
        if not key:
            raise invalid_field(path, "a label needs a name")
        short_text(key, path)
        short_text(value, f"{path}[{key}]")
    return dict(labels)


def tenant_from_metadata(metadata: Iterable[tuple[str, str | bytes]]) -> str:
    """The caller's tenant: the metadata key `ampd-tenant`, "default" without one.

    AmpdError INVALID_FIELD `ampd-tenant`: given twice, or not 1 to 64 letters, digits and `._-`.
    """
    found = [value for key, value in metadata if key == TENANT_KEY]
    if not found:
        return DEFAULT_TENANT
    tenant = found[0]
    if (
        len(found) > 1
        or not isinstance(tenant, str)
        or len(tenant) > MAX_NAME_CHARS
        or not _TENANT.fullmatch(tenant)
    ):
        raise invalid_field(
            TENANT_KEY, f"once, 1 to {MAX_NAME_CHARS} letters, digits, '.', '_' or '-'"
        )
    return tenant
