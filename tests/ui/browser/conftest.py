"""What the tests in a browser start from."""

from support.page import browser, open_tab, people, served  # noqa: F401
from support.shell import guest_browser, kept, opened, resident, tunnel, visitor  # noqa: F401
