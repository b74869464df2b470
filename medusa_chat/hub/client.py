"""The one place that talks to the Hub: short timeouts, and every failure as one line to act on.

huggingface_hub is imported when the first function is called, never at the start of the program.
"""

import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from medusa_chat.errors import ModelError

ANSWER_SECONDS = 4.0  # how long a small question may take: connecting, and each silence after
PATIENCE_SECONDS = 5.0  # how long a small question waits for a busy Hub, all tries together
REPO_ID = re.compile(r"[\w-][\w.-]{0,95}(/[\w-][\w.-]{0,95})?", re.ASCII)
T = TypeVar("T")


class HubError(ModelError):
    """The Hub cannot give what was asked for.

    kind: "gated", "missing", "refused", "busy", "broken", "offline", "network", "disk", "damaged"
    or "cancelled". link: a page where the user can do something about it, else empty. retry_after:
    seconds after which another try makes sense, None where none does.
    """

    kind: str = ""
    link: str = ""
    retry_after: float | None = None


def failure(kind: str, message: str, link: str = "", retry_after: float | None = None) -> HubError:
    """A HubError; its fields are set after its making so that it crosses a pipe whole."""
    error = HubError(message)
    error.kind, error.link, error.retry_after = kind, link, retry_after
    return error


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


def headers() -> dict[str, str]:
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
        answer = get_session().get(url, params=params, headers=headers() | own, timeout=timeout)
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
    from huggingface_hub import errors
    from huggingface_hub.utils import httpx

    try:
        yield
    except errors.GatedRepoError as error:
        raise gated(repo) from error
    except errors.RevisionNotFoundError as error:
        raise failure("missing", f"{repo} has no such revision: leave it out") from error
    except errors.RemoteEntryNotFoundError as error:
        raise failure("missing", f"{repo} has no such file ({_url(error)})") from error
    except errors.RepositoryNotFoundError as error:
        raise missing(repo) from error
    except errors.OfflineModeIsEnabled as error:
        raise offline(repo) from error
    except errors.HfHubHTTPError as error:
        raise _refused(repo, error) from error
    except errors.HFValidationError as error:
        raise failure("missing", f"{repo!r} is no Hub id: it looks like owner/name") from error
    except httpx.TimeoutException as error:
        raise failure(
            "network", "the Hub does not answer: check the network and try again, or use --offline"
        ) from error
    except httpx.TransportError as error:
        raise failure(
            "network",
            f"the Hub cannot be reached ({_reason(error)}): check the network and try again, or "
            "use --offline",
        ) from error
    except (httpx.RequestError, ValueError, KeyError, TypeError) as error:
        raise failure(
            "broken",
            f"what answers at {constants().ENDPOINT} is not the Hub ({_reason(error)}): check "
            "HF_ENDPOINT, and whether a proxy or a sign-in page stands in between",
        ) from error


def gated(repo: str) -> HubError:
    """Its licence must be accepted, and the token must say whose it is."""
    from huggingface_hub import get_token

    then = "try again" if get_token() else "run `hf auth login` and try again"
    return failure(
        "gated", f"{repo} is gated: accept its licence at {page(repo)}, then {then}", page(repo)
    )


def missing(repo: str) -> HubError:
    from huggingface_hub import get_token

    private = "" if get_token() else ", or it is private: run `hf auth login`"
    return failure("missing", f"there is no {repo} on the Hub{private}")


def offline(repo: str) -> HubError:
    return failure(
        "offline",
        f"the Hub repo {repo} is not in the cache and the network is off: leave --offline and "
        "HF_HUB_OFFLINE out, or give a local folder",
    )


def _refused(repo: str, error: Any) -> HubError:
    """For an HTTP status that has no class of its own in huggingface_hub."""
    status = error.response.status_code
    if status == 401:
        return failure(
            "refused",
            f"the Hub refuses {repo} (401): it is private or gone, or your token is not valid: "
            "check the id, run `hf auth login`",
        )
    if status == 404:
        return missing(repo)
    if status == 403:
        return failure(
            "refused",
            f"your token may not read {repo} (403): give it that right at "
            f"{page('settings/tokens')}, or run `hf auth login`",
            page("settings/tokens"),
        )
    if status == 429:
        wait = _wait_asked(error.response.headers)
        return failure(
            "busy",
            f"the Hub asks to wait {wait:.0f} s (429, too many requests): try again then; "
            "`hf auth login` raises the limit",
            retry_after=wait,
        )
    if status >= 500:
        return failure(
            "broken", f"the Hub has trouble ({status}): try again in a minute", retry_after=0.5
        )
    return failure("refused", f"the Hub refuses {repo} ({status}): {_reason(error)}")


def _wait_asked(values: Any) -> float:
    """Seconds that a 429 asks for, by Retry-After or RateLimit; 60 when it does not say."""
    from huggingface_hub.utils import parse_ratelimit_headers

    if (text := values.get("Retry-After", "").strip()).isdigit():
        return float(text)
    limit = parse_ratelimit_headers(values)
    return float(limit.reset_in_seconds) if limit and limit.remaining == 0 else 60.0


def _url(error: Any) -> str:
    return str(error.response.url).rpartition("/")[2].partition("?")[0]


def _reason(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:200] if lines else type(error).__name__
