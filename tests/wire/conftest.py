"""Property tests of conversions: no wall-clock deadline, the machine is shared."""

from hypothesis import settings

settings.register_profile("wire", deadline=None)
settings.load_profile("wire")
