"""The Hub client: settings, requests with a timeout, and a HubError for every failure.

huggingface_hub reads its environment when it is imported, after --offline and --data-dir have set
it, so it is imported inside functions only. In 2.4, list_models and auth_check have no timeout and
http_backoff waits as long as a busy server asks; `get` fails after seconds.
"""

import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from medusa_chat import __version__
from medusa_chat.errors import ModelError, first_line

ANSWER_SECONDS = 4.0  # to connect, and between bytes
RETRY_SECONDS = 5.0  # for all tries of a request to a busy Hub
ERROR_NUMBER = re.compile(r"^\[(Errno|WinError) -?\d+\] ")
T = TypeVar("T")


class HubError(ModelError):
    """A request to the Hub that failed.

    kind: "gated", "missing", "refused", "busy", "broken", "offline", "network", "disk" or
    "damaged". link: the page on which to fix it, or empty. retry_after: seconds to wait before a
    retry, None if a retry is useless. Pickled with its attributes.
    """

    def __init__(
        self, message: str, kind: str = "", link: str = "", retry_after: float | None = None
    ) -> None:
        super().__init__(message)
        self.kind, self.link, self.retry_after = kind, link, retry_after


def constants() -> Any:
    """huggingface_hub's constants: endpoint, folders, timeouts, offline."""
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    from huggingface_hub import constants as values
    from huggingface_hub.utils import logging

    logging.set_verbosity_error()  # HubError reports failures
    return values


def is_offline() -> bool:
    """Whether HF_HUB_OFFLINE (which --offline sets) disables the network."""
    return bool(constants().is_offline_mode())


def answer_seconds() -> float:
    """The timeout of a small request: HF_HUB_ETAG_TIMEOUT if set, else ANSWER_SECONDS."""
    chosen, default = constants().HF_HUB_ETAG_TIMEOUT, constants().DEFAULT_ETAG_TIMEOUT
    return ANSWER_SECONDS if chosen == default else float(chosen)


def page(repo: str) -> str:
    """The URL of a repo's page."""
    return f"{constants().ENDPOINT}/{repo}"


def api() -> Any:
    """huggingface_hub's HfApi."""
    endpoint = constants().ENDPOINT
    from huggingface_hub import HfApi

    return HfApi(endpoint, library_name="medusa-chat", library_version=__version__)


def file_url(repo: str, sha: str, name: str) -> str:
    """The URL of a file at a commit."""
    from huggingface_hub import hf_hub_url

    return hf_hub_url(repo, name, revision=sha, endpoint=constants().ENDPOINT)


def request_headers() -> dict[str, str]:
    """The headers of every request: the user agent, and the token if there is one."""
    from huggingface_hub.utils import build_hf_headers

    return build_hf_headers(library_name="medusa-chat", library_version=__version__)


def get(
    url: str, timeout: float | None = None, byte_range: str | None = None, **params: Any
) -> Any:
    """The response to a GET, body included. Call it inside `ask`."""
    from huggingface_hub.utils import get_session, hf_raise_for_status

    headers = request_headers()
    if byte_range:
        headers |= {"Accept-Encoding": "identity", "Range": byte_range}
    timeout = timeout or answer_seconds()
    response = get_session().get(url, params=params or None, headers=headers, timeout=timeout)
    hf_raise_for_status(response)
    return response


def list_models(what: str, timeout: float | None = None, **params: Any) -> list[Any]:
    """HfApi.list_models with a timeout. what: the subject of a HubError."""

    def call() -> list[Any]:
        from huggingface_hub import ModelInfo

        rows = get(f"{api().endpoint}/api/models", timeout, **params).json()
        return [ModelInfo(**row) for row in rows]

    return ask(what, call)


def ask(repo: str, call: Callable[[], T]) -> T:
    """Returns call(), with retries for RETRY_SECONDS if the Hub is busy. Raises HubError."""
    until = time.monotonic() + RETRY_SECONDS
    while True:
        try:
            with hub_errors(repo):
                return call()
        except HubError as error:
            wait = error.retry_after
            if wait is None or time.monotonic() + wait > until:
                raise
            time.sleep(wait)


@contextmanager
def hub_errors(repo: str) -> Iterator[None]:
    """Turn errors of huggingface_hub and of the network into a HubError with a remedy."""
    constants()
    try:
        yield
    except Exception as error:
        hub_error = _hub_error(repo, error)
        if hub_error is None:
            raise
        raise hub_error from error


def _hub_error(repo: str, error: Exception) -> HubError | None:
    """The HubError for an error of the Hub or the network; None for any other."""
    from huggingface_hub import errors
    from huggingface_hub.utils import httpx

    what = f" for {repo}" if "/" in repo else ""
    then = "check the network and try again, or use --offline"
    match error:
        case errors.GatedRepoError():
            return _gated(repo)
        case errors.RevisionNotFoundError():
            return HubError(f"{repo} has no such revision: check its name, or omit it", "missing")
        case errors.RemoteEntryNotFoundError():
            name = error.response.url.path.rpartition("/")[2]
            return HubError(f"{repo} has no such file ({name})", "missing")
        case errors.RepositoryNotFoundError():
            return _missing(repo)
        case errors.OfflineModeIsEnabled():
            return offline_error(repo)
        case errors.HfHubHTTPError():
            return _of_status(repo, error, error.response.status_code)
        case errors.HFValidationError():
            return HubError(f"{repo!r} is not a valid Hub id: give owner/name", "missing")
        case httpx.TimeoutException():
            return HubError(f"the Hub does not answer{what}: {then}", "network")
        case httpx.TransportError():
            why = _reason(error)
            return HubError(f"the Hub cannot be reached{what} ({why}): {then}", "network")
        case httpx.RequestError() | ValueError() | KeyError() | TypeError():
            who = f"the server at {constants().ENDPOINT} is not the Hub ({_reason(error)})"
            check = "check HF_ENDPOINT, and look for a proxy or a sign-in page"
            return HubError(f"{who}: {check}", "broken")
    return None


def offline_error(repo: str) -> HubError:
    return HubError(f"{repo} is not in the cache, and {offline_words(repo)}", "offline")


def offline_words(repo: str) -> str:
    """Why a repo is not downloaded, and what to do."""
    if is_offline():
        then = "omit --offline (and HF_HUB_OFFLINE), or give a local folder"
        return f"the network is disabled: {then}"
    return f"is not downloaded unasked: load it again, or run medusa-chat models pull {repo}"


def _gated(repo: str) -> HubError:
    from huggingface_hub import get_token

    then = ", then try again" if get_token() else " and log in with `hf auth login`"
    what = f"{repo} is a gated repository: accept its licence at {page(repo)}{then}"
    return HubError(what, "gated", page(repo))


def _missing(repo: str) -> HubError:
    from huggingface_hub import get_token

    private = "" if get_token() else "; if it is private, log in with `hf auth login`"
    return HubError(f"{repo} is not on the Hub{private}", "missing")


def _of_status(repo: str, error: Any, status: int) -> HubError:
    """The error of an HTTP status that has no class of its own in huggingface_hub."""
    if status == 404:
        return _missing(repo)
    if status == 401:
        why = f"access to {repo} denied (401): it is private or deleted, or your token is invalid"
        return HubError(f"{why}: check the id, or log in again with `hf auth login`", "refused")
    if status == 403:
        tokens = page("settings/tokens")
        then = f"allow it at {tokens}, or log in with another token (`hf auth login`)"
        return HubError(
            f"your token does not allow reading {repo} (403): {then}", "refused", tokens
        )
    if status == 429:
        wait = _retry_after(error.response.headers)
        then = f"wait {wait:.0f} s and try again; `hf auth login` raises the limit"
        return HubError(f"the rate limit of the Hub is reached (429): {then}", "busy", "", wait)
    if status >= 500:
        what = f"the Hub has a server error ({status}): try again in a minute"
        return HubError(what, "broken", retry_after=1.0)
    return HubError(
        f"the Hub refused the request for {repo} ({status}): {_reason(error)}", "refused"
    )


def _retry_after(headers: Any) -> float:
    """Seconds from the Retry-After or RateLimit header of a 429; 60 without either."""
    from huggingface_hub.utils import parse_ratelimit_headers

    if (text := headers.get("Retry-After", "").strip()).isdigit():
        return float(text)
    limit = parse_ratelimit_headers(headers)
    return float(limit.reset_in_seconds) if limit and limit.remaining == 0 else 60.0


def _reason(error: BaseException) -> str:
    """The first line of an error, without its errno."""
    return ERROR_NUMBER.sub("", first_line(error))[:200]
