"""search(): Medusa checkpoints on the Hub, recognised by their files, not by their names."""

import json
import time
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from medusa_chat import paths
from medusa_chat.hub import repo_files
from medusa_chat.hub.client import HubError, ask, file_url, get, is_offline, list_models

LIMIT = 200
DEADLINE_SECONDS = 6.0  # for the whole search
UNSURE = 16  # repos whose index or config is read to decide
EXPAND = ["downloads", "likes", "gated", "siblings", "config", "lastModified"]


@dataclass(frozen=True)
class SearchResult:
    """A repo on the Hub with Medusa heads. evidence: the file that shows it."""

    id: str
    downloads: int
    likes: int
    gated: bool
    updated: str
    evidence: str


def search(text: str = "") -> list[SearchResult]:
    """Repos with Medusa heads whose id contains every word of `text`, most downloaded first.

    Takes at most DEADLINE_SECONDS. The result is saved for last_search. Raises HubError.
    """
    if is_offline():
        why = "the network is disabled, and no earlier result is saved"
        raise HubError(f"{why}: see medusa-chat models list", "offline")
    until = time.monotonic() + DEADLINE_SECONDS
    words = text.lower().split()
    infos: dict[str, Any] = {}
    for query in dict.fromkeys(["medusa", " ".join(words) or "medusa"]):
        params: dict[str, Any] = {
            "search": query,
            "sort": "downloads",
            "limit": LIMIT,
            "expand": EXPAND,
        }
        infos |= {info.id: info for info in list_models(f"the search for {query!r}", **params)}
    infos = {name: info for name, info in infos.items() if all(w in name.lower() for w in words)}
    evidence = {name: _evidence(info) for name, info in infos.items()}
    unsure = [info for name, info in infos.items() if not evidence[name] and _could_be(info)]
    evidence |= _evidence_inside(unsure[:UNSURE], until)
    results = [_result(infos[name], proof) for name, proof in evidence.items() if proof]
    results.sort(key=lambda result: -result.downloads)
    _save(" ".join(words), results)
    return results


def last_search(text: str = "") -> list[SearchResult]:
    """The saved result of the last search for `text`, or []. No network."""
    try:
        return [SearchResult(**row) for row in _saved().get(" ".join(text.lower().split()), ())]
    except TypeError:  # written by another version
        return []


def _names(info: Any) -> list[str]:
    return [file.rfilename for file in info.siblings or ()]


def _evidence(info: Any) -> str:
    heads = repo_files.heads_files(_names(info))
    return heads[0] if heads else "config.json" if repo_files.says_medusa(info.config) else ""


def _could_be(info: Any) -> bool:
    """Whether its index or config is worth a request: it has weights and a telling name."""
    is_named = "medusa" in info.id.lower() or "heads" in info.id.lower()
    return is_named and not info.gated and bool(repo_files.backbone(_names(info)).weights)


def _evidence_inside(infos: list[Any], until: float) -> dict[str, str]:
    """Evidence from the index or config of each repo, until the deadline."""
    pool = ThreadPoolExecutor(4, thread_name_prefix="search")
    try:
        requests = {pool.submit(_evidence_of_files, info): info.id for info in infos}
        done, _ = wait(requests, timeout=max(0.0, until - time.monotonic()))
        return {requests[one]: one.result() for one in done}
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _evidence_of_files(info: Any) -> str:
    names = _names(info)
    index = repo_files.backbone(names).index or ""
    for name in filter(names.__contains__, (index, "config.json")):
        shows_heads = repo_files.index_has_heads if name == index else repo_files.says_medusa
        with suppress(HubError):  # unreadable: not listed
            if shows_heads(_read_json(info.id, name)):
                return name
    return ""


def _read_json(repo: str, name: str) -> object:
    return ask(repo, lambda: get(file_url(repo, "main", name), timeout=2).json())


def _result(info: Any, evidence: str) -> SearchResult:
    updated = info.last_modified.date().isoformat() if info.last_modified else ""
    counts = int(info.downloads or 0), int(info.likes or 0)
    return SearchResult(info.id, *counts, bool(info.gated), updated, evidence)


def _saved() -> dict[str, Any]:
    with suppress(OSError):
        return repo_files.parse_json((paths.cache_dir() / "hub_searches.json").read_bytes())
    return {}


def _save(words: str, results: list[SearchResult]) -> None:
    searches = _saved() | {words: [asdict(result) for result in results]}
    with suppress(OSError):  # then last_search finds nothing
        paths.write_text(paths.cache_dir() / "hub_searches.json", json.dumps(searches))
