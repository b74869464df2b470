"""A checkpoint on disk that a test may break."""

from support.bad_heads import backbone, lone_heads  # noqa: F401
from support.loading import folder, whole  # noqa: F401
from support.shipped import shipping  # noqa: F401
