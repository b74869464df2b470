"""HubError: why the Hub does not give what was asked for, as one line with its remedy."""

import re
from typing import Any

from medusa_chat.errors import ModelError
from medusa_chat.hub.environment import page

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


def status_error(repo: str, error: Any) -> HubError:
    """The error of an HTTP status that has no class of its own in huggingface_hub."""
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
            f"the Hub's rate limit is reached (429): wait {wait:.0f} s and try again; "
            "`hf auth login` raises the limit",
            "busy",
            retry_after=wait,
        )
    if status >= 500:
        return HubError(
            f"the Hub has a server error ({status}): try again in a minute",
            "broken",
            retry_after=0.5,
        )
    return HubError(f"the Hub refuses {repo} ({status}): {reason(error)}", "refused")


def _wait_asked(values: Any) -> float:
    """Seconds that a 429 asks for, by Retry-After or RateLimit; 60 when it does not say."""
    from huggingface_hub.utils import parse_ratelimit_headers

    if (text := values.get("Retry-After", "").strip()).isdigit():
        return float(text)
    limit = parse_ratelimit_headers(values)
    return float(limit.reset_in_seconds) if limit and limit.remaining == 0 else 60.0


def file_name(error: Any) -> str:
    """The file that was asked for in vain."""
    return str(error.response.url).rpartition("/")[2].partition("?")[0]


def reason(error: BaseException) -> str:
    """Its first line, in words that say something to who does not know the system's."""
    text = next(iter(str(error).strip().splitlines()), "")
    if UNKNOWN_NAME.search(text):
        return "its address cannot be resolved"
    return ERROR_NUMBER.sub("", text)[:200] or type(error).__name__
