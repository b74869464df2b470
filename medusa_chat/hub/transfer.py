"""One file from the Hub to the cache: resumed where it broke off, and checked before it counts.

huggingface_hub 2.4 fetches with hf_hub_download, and http_get below it. Neither is used, since they
- delete what has arrived when a download breaks off, is stopped, or ends with its process;
- compare the size only, without Xet: a damaged file enters the cache;
- read 10 MB at a time, and lose what is left of them with the connection;
- sleep through any Retry-After, so that a stop waits and the user is told nothing.
So its client, its headers and its lock bring the bytes into its folders. A file is called
`<hash>.incomplete` until its size and hash are what the Hub says.
"""

from pathlib import Path

from medusa_chat import paths
from medusa_chat.hub.cached_file import PartialFile, discard, disk_errors, is_intact, locked
from medusa_chat.hub.client import explaining, file_path, request_headers
from medusa_chat.hub.environment import constants
from medusa_chat.hub.errors import HubError
from medusa_chat.hub.repo import RepoFile
from medusa_chat.hub.repo_plan import RepoPlan
from medusa_chat.hub.transfer_state import TransferState

CONNECT_SECONDS = 5.0
TRIES = 4  # in a row, without a byte in between
LONGEST_WAIT = 30.0  # what a busy Hub may ask for; longer, and the user decides


def ensure_cached(part: RepoPlan, file: RepoFile, state: TransferState, check: bool) -> None:
    """Make sure that the whole `file` is in the cache. check: compare a cached file's hash as well.

    Raises HubError, Cancelled.
    """
    state.file, state.note = file.name, ""
    blob, copy = part.places(file)
    partial = blob.with_name(f"{file.blob}.incomplete")
    with disk_errors(blob.parent, file):
        place = copy if copy.is_file() and not blob.is_file() else blob
        if is_intact(place, file, state, check):
            return
        discard(place, file, state)
        blob.parent.mkdir(parents=True, exist_ok=True)
        with locked(blob, file):
            if is_intact(blob, file, state, check=False):  # another process was faster
                return
            for _ in range(2):
                if _fetch(part, file, partial, state):
                    paths.replace(partial, blob)
                    return
                state.note = f"{file.name} is damaged: downloading it again"
    raise HubError(
        f"{file.name} of {part.id} is damaged (its hash differs from the Hub's): try again "
        "later, or on another network",
        "damaged",
    )


def _fetch(part: RepoPlan, file: RepoFile, place: Path, state: TransferState) -> bool:
    """Fetch what is missing of a partial file; whether its hash is right. Deletes a wrong one."""
    with open(place, "ab+") as stream:
        partial = PartialFile(stream, file)
        partial.resume(state)
        failures = 0
        while partial.size < file.size:
            before = partial.size
            try:
                _stream(part, partial, state)
            except HubError as error:
                failures = failures + 1 if partial.size == before else 1
                _wait(error, failures, file, state)
    if partial.hasher.hexdigest() == file.blob:
        return True
    place.unlink()
    state.total += file.size
    return False


def _stream(part: RepoPlan, partial: PartialFile, state: TransferState) -> None:
    """Append one answer of the Hub. Raises HubError, also when it ends too early."""
    from huggingface_hub.utils import get_session, hf_raise_for_status, httpx

    file, start = partial.file, partial.size
    state.phase = "connect"
    url = f"{constants().ENDPOINT}/{file_path(part.id, part.sha, file.name)}"
    own = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={start}-"} if start else {})
    timeout = httpx.Timeout(float(constants().HF_HUB_DOWNLOAD_TIMEOUT), connect=CONNECT_SECONDS)
    ask = {"headers": request_headers() | own, "timeout": timeout, "follow_redirects": True}
    try:
        with explaining(part.id), get_session().stream("GET", url, **ask) as response:
            state.response = response
            state.check()
            hf_raise_for_status(response)
            answered = response.headers.get("Content-Range", "")
            if start and not answered.startswith(f"bytes {start}-"):  # it begins at the beginning
                state.total += start
                partial.clear()
            for chunk in response.iter_bytes():
                state.check()
                partial.append(chunk)
                state.phase, state.done = "download", state.done + len(chunk)
    except HubError:
        state.check()  # a read that was woken to end is no failure
        raise
    finally:
        state.response = None
    if partial.size < file.size:
        raise HubError(f"the connection dropped in {file.name}", "network", retry_after=0.0)


def _wait(error: HubError, failures: int, file: RepoFile, state: TransferState) -> None:
    """Wait before another try, in sight of the user; raises the error when none makes sense."""
    asked = error.retry_after or 0.0
    can_retry = error.kind == "network" or error.retry_after is not None
    if not can_retry or failures >= TRIES or asked > LONGEST_WAIT:
        if error.kind != "network":
            raise error
        raise HubError(
            f"{file.name}: {error} (what was downloaded is kept: the next try resumes there)",
            "network",
        ) from error
    wait = max(asked, min(0.5 * 2 ** (failures - 1), 4.0))
    state.phase = "wait"
    state.note = f"{file.name}: {str(error).partition(':')[0]}; again in {wait:.1f} s"
    state.stop.wait(wait)
    state.check()
