"""All scenarios, by importing them."""

import bodies_aborts  # noqa: F401 - registers
import bodies_capacity  # noqa: F401
import bodies_decode  # noqa: F401
import bodies_drains  # noqa: F401
import bodies_prefill  # noqa: F401
import bodies_routes  # noqa: F401
import bodies_store  # noqa: F401
from catalogue import SCENARIOS

__all__ = ["SCENARIOS"]
