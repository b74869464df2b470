"""A checkpoint on disk that a test may break."""

from support.loading import folder, whole  # noqa: F401
