"""HubError: what huggingface_hub and the network raise, as one line with its remedy."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from medusa_chat.errors import ModelError
from medusa_chat.hub.environment import constants, page

UNKNOWN_NAME = re.compile("getaddrinfo|nodename|Name or service|name resolution|No address assoc")
ERROR_NUMBER = re.compile(r"^\[(Errno|WinError) -?\d+\] ")


class HubError(ModelError):
    """The Hub cannot give what was asked for. All but the message crosses a pipe as attributes.

    kind: "gated", "missing", "refused", "busy", "broken", "offline", "network", "disk" or
    "damaged". link: a page where the user can do something about it, else empty. retry_after:
    seconds after which another try makes sense, None where none does.
    """

    def __init__(
        self, message: str, kind: str = "", link: str = "", retry_after: float | None = None
    ) -> None:
        super().__init__(message)
        self.kind, self.link, self.retry_after = kind, link, retry_after


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

    then = "check the network and try again, or use --offline"
    match error:
        case errors.GatedRepoError():
            return gated_error(repo)
        case errors.RevisionNotFoundError():
            return HubError(f"{repo} has no such revision: check it, or omit it", "missing")
        case errors.RemoteEntryNotFoundError():
            return HubError(f"{repo} has no such file ({_file_name(error)})", "missing")
        case errors.RepositoryNotFoundError():
            return missing_error(repo)
        case errors.OfflineModeIsEnabled():
            return offline_error(repo)
        case errors.HfHubHTTPError():
            return _status_error(repo, error)
        case errors.HFValidationError():
            return HubError(f"{repo!r} is not a valid Hub id: give owner/name", "missing")
        case httpx.TimeoutException():
            return HubError(f"the Hub does not answer: {then}", "network")
        case httpx.TransportError():
            return HubError(f"the Hub cannot be reached ({_reason(error)}): {then}", "network")
        case httpx.RequestError() | ValueError() | KeyError() | TypeError():
            return HubError(
                f"what answers at {constants().ENDPOINT} is not the Hub ({_reason(error)}): check "
                "HF_ENDPOINT, and whether a proxy or a sign-in page is in between",
                "broken",
            )
    return None


def gated_error(repo: str) -> HubError:
    """Its licence must be accepted, and the token must say whose it is."""
    from huggingface_hub import get_token

    then = "try again" if get_token() else "run `hf auth login` and try again"
    return HubError(
        f"{repo} is gated: accept its licence at {page(repo)}, then {then}", "gated", page(repo)
    )


def missing_error(repo: str) -> HubError:
    from huggingface_hub import get_token

    private = "" if get_token() else ", or it is private: run `hf auth login`"
    return HubError(f"there is no {repo} on the Hub{private}", "missing")


def offline_error(repo: str) -> HubError:
    return HubError(
        f"the Hub repo {repo} is not in the cache and the network is off: omit --offline and "
        "HF_HUB_OFFLINE, or give a local folder",
        "offline",
    )


def _status_error(repo: str, error: Any) -> HubError:
    """For an HTTP status that has no class of its own in huggingface_hub."""
    status = error.response.status_code
    if status == 401:
        return HubError(
            f"the Hub refuses {repo} (401): it is private or gone, or your token is not valid: "
            "check the id, run `hf auth login`",
            "refused",
        )
    if status == 404:
        return missing_error(repo)
    if status == 403:
        return HubError(
            f"your token may not read {repo} (403): give it that right at "
            f"{page('settings/tokens')}, or run `hf auth login`",
            "refused",
            page("settings/tokens"),
        )
    if status == 429:
        wait = _wait_asked(error.response.headers)
        return HubError(
            f"the Hub asks to wait {wait:.0f} s (429, too many requests): try again then; "
            "`hf auth login` raises the limit",
            "busy",
            retry_after=wait,
        )
    if status >= 500:
        return HubError(
            f"the Hub has trouble ({status}): try again in a minute", "broken", retry_after=0.5
        )
    return HubError(f"the Hub refuses {repo} ({status}): {_reason(error)}", "refused")


def _wait_asked(values: Any) -> float:
    """Seconds that a 429 asks for, by Retry-After or RateLimit; 60 when it does not say."""
    from huggingface_hub.utils import parse_ratelimit_headers

    if (text := values.get("Retry-After", "").strip()).isdigit():
        return float(text)
    limit = parse_ratelimit_headers(values)
    return float(limit.reset_in_seconds) if limit and limit.remaining == 0 else 60.0


def _file_name(error: Any) -> str:
    return str(error.response.url).rpartition("/")[2].partition("?")[0]


def _reason(error: BaseException) -> str:
    """Its first line, in words that say something to who does not know the system's."""
    text = next(iter(str(error).strip().splitlines()), "")
    if UNKNOWN_NAME.search(text):
        return "its address cannot be resolved"
    return ERROR_NUMBER.sub("", text)[:200] or type(error).__name__
