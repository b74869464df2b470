"""The one place that talks to the Hub: short timeouts, and every failure as one line to act on.

huggingface_hub reads its environment when it is imported, so no module here imports it at its top:
--offline and --data-dir come first. Its HfApi and its http_backoff are used where their time is
bounded: auth_check and list_models have no timeout, and the backoff sleeps as long as it is told.
"""

import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar
from urllib.parse import quote

from medusa_chat.errors import ModelError

ANSWER_SECONDS = 4.0  # how long a small question may take: connecting, and each silence after
PATIENCE_SECONDS = 5.0  # how long a small question waits for a busy Hub, all tries together
COMMIT = re.compile(r"[0-9a-f]{40}")
REPO_ID = re.compile(r"[\w-][\w.-]{0,95}(/[\w-][\w.-]{0,95})?", re.ASCII)
T = TypeVar("T")


class HubError(ModelError):
    """The Hub cannot give what was asked for. All but the message crosses a pipe as attributes.

    kind: "gated", "missing", "refused", "busy", "broken", "offline", "network", "disk", "damaged"
    or "cancelled". link: a page where the user can do something about it, else empty. retry_after:
    seconds after which another try makes sense, None where none does.
    """

    def __init__(
        self, message: str, kind: str = "", link: str = "", retry_after: float | None = None
    ) -> None:
        super().__init__(message)
        self.kind, self.link, self.retry_after = kind, link, retry_after


def is_repo_id(name: object) -> bool:
    """Whether `name` could be a repo of the Hub: "owner/name", or the "name" of an old one."""
    return (
        isinstance(name, str)
        and REPO_ID.fullmatch(name) is not None
        and not re.search(r"--|\.\.|\.git$|[.-]$|[.-]/", name)
    )


def constants() -> Any:
    """huggingface_hub's constants: endpoint, folders, offline; read from the environment once."""
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")  # nothing is told, nor waited for
    from huggingface_hub import constants as values
    from huggingface_hub.utils import logging

    logging.set_verbosity_error()  # what goes wrong is said once, by us
    return values


def is_offline() -> bool:
    """Whether HF_HUB_OFFLINE (or --offline, which sets it) forbids the network."""
    return bool(constants().HF_HUB_OFFLINE)


def answer_seconds() -> float:
    """How long a small question may take; HF_HUB_ETAG_TIMEOUT, huggingface_hub's own variable for
    that, overrides it."""
    chosen = os.environ.get("HF_HUB_ETAG_TIMEOUT", "")
    return float(chosen) if chosen.isdecimal() and int(chosen) else ANSWER_SECONDS


def page(repo: str) -> str:
    """The repo's page in the browser."""
    return f"{constants().ENDPOINT}/{repo}"


def file_path(repo: str, sha: str, name: str) -> str:
    """Where the Hub has a file of a commit: a path for get()."""
    return f"{repo}/resolve/{sha}/{quote(name)}"


def request_headers() -> dict[str, str]:
    """What every request carries: the token, if the user has one, and who is asking."""
    constants()
    from huggingface_hub.utils import build_hf_headers

    from medusa_chat import __version__

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

    then = "check the network and try again, or use --offline"
    match error:
        case errors.GatedRepoError():
            return gated_error(repo)
        case errors.RevisionNotFoundError():
            return HubError(f"{repo} has no such revision: leave it out", "missing")
        case errors.RemoteEntryNotFoundError():
            return HubError(f"{repo} has no such file ({_file_name(error)})", "missing")
        case errors.RepositoryNotFoundError():
            return missing_error(repo)
        case errors.OfflineModeIsEnabled():
            return offline_error(repo)
        case errors.HfHubHTTPError():
            return _status_error(repo, error)
        case errors.HFValidationError():
            return HubError(f"{repo!r} is no Hub id: it looks like owner/name", "missing")
        case httpx.TimeoutException():
            return HubError(f"the Hub does not answer: {then}", "network")
        case httpx.TransportError():
            return HubError(f"the Hub cannot be reached ({_reason(error)}): {then}", "network")
        case httpx.RequestError() | ValueError() | KeyError() | TypeError():
            return HubError(
                f"what answers at {constants().ENDPOINT} is not the Hub ({_reason(error)}): check "
                "HF_ENDPOINT, and whether a proxy or a sign-in page stands in between",
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
        f"the Hub repo {repo} is not in the cache and the network is off: leave --offline and "
        "HF_HUB_OFFLINE out, or give a local folder",
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
    lines = str(error).strip().splitlines()
    return lines[0][:200] if lines else type(error).__name__
