"""Property tests of the pure core: no wall-clock deadline, the machine is shared."""

from hypothesis import settings

settings.register_profile("core", deadline=None)
settings.load_profile("core")
