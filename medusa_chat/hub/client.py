"""Small questions to the Hub: short timeouts, and every failure as one line to act on.

huggingface_hub 2.4's auth_check and list_models have no timeout, and its http_backoff sleeps as
long as a busy Hub says; so its client asks here, for seconds at most.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar
from urllib.parse import quote

from medusa_chat import __version__
from medusa_chat.hub.environment import answer_seconds, constants
from medusa_chat.hub.errors import (
    HubError,
    file_name,
    gated_error,
    missing_error,
    offline_error,
    reason,
    status_error,
)

PATIENCE_SECONDS = 5.0  # how long a small question waits for a busy Hub, all tries together
T = TypeVar("T")


def file_path(repo: str, sha: str, name: str) -> str:
    """Where the Hub has a file of a commit: a path for get()."""
    return f"{repo}/resolve/{sha}/{quote(name)}"


def request_headers() -> dict[str, str]:
    """The headers of every request: the token, if the user has one, and the user agent."""
    constants()
    from huggingface_hub.utils import build_hf_headers

    return build_hf_headers(library_name="medusa-chat", library_version=__version__)


def get(
    path: str,
    repo: str,
    params: dict[str, Any] | None = None,
    byte_range: str | None = None,
    timeout: float | None = None,
) -> Any:
    """The answer (an httpx response, read) to a GET of `path` at the Hub. Raises HubError."""
    timeout = timeout or answer_seconds()
    own = {"Accept-Encoding": "identity", "Range": byte_range} if byte_range else {}

    def call() -> Any:
        from huggingface_hub.utils import get_session, hf_raise_for_status

        url = f"{constants().ENDPOINT}/{path}"
        answer = get_session().get(
            url, params=params, headers=request_headers() | own, timeout=timeout
        )
        hf_raise_for_status(answer)
        return answer

    return ask(repo, call)


def ask(repo: str, call: Callable[[], T]) -> T:
    """call()'s value. A busy or stumbling Hub is asked again, for a few seconds at most."""
    until = time.monotonic() + PATIENCE_SECONDS
    for _ in range(3):
        try:
            with explaining(repo):
                return call()
        except HubError as error:
            wait = error.retry_after
            if wait is None or time.monotonic() + wait > until:
                raise
            time.sleep(wait)
    with explaining(repo):
        return call()


@contextmanager
def explaining(repo: str) -> Iterator[None]:
    """Turn what huggingface_hub and the network raise into one HubError with its remedy."""
    constants()
    try:
        yield
    except Exception as error:
        explained = _explained(repo, error)
        if explained is None:
            raise
        raise explained from error


def _explained(repo: str, error: Exception) -> HubError | None:
    """None for an error that is neither the Hub's nor the network's."""
    from huggingface_hub import errors
    from huggingface_hub.utils import httpx

    what = f" for {repo}" if "/" in repo else ""
    then = "check the network and try again, or use --offline"
    match error:
        case errors.GatedRepoError():
            return gated_error(repo)
        case errors.RevisionNotFoundError():
            return HubError(f"{repo} has no such revision: check it, or omit it", "missing")
        case errors.RemoteEntryNotFoundError():
            return HubError(f"{repo} has no such file ({file_name(error)})", "missing")
        case errors.RepositoryNotFoundError():
            return missing_error(repo)
        case errors.OfflineModeIsEnabled():
            return offline_error(repo)
        case errors.HfHubHTTPError():
            return status_error(repo, error)
        case errors.HFValidationError():
            return HubError(f"{repo!r} is not a valid Hub id: give owner/name", "missing")
        case httpx.TimeoutException():
            return HubError(f"the Hub does not answer{what}: {then}", "network")
        case httpx.TransportError():
            why = f"the Hub cannot be reached{what} ({reason(error)})"
            return HubError(f"{why}: {then}", "network")
        case httpx.RequestError() | ValueError() | KeyError() | TypeError():
            return HubError(
                f"what answers at {constants().ENDPOINT} is not the Hub ({reason(error)}): check "
                "HF_ENDPOINT, and whether a proxy or a sign-in page is in between",
                "broken",
            )
    return None
