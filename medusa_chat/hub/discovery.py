"""search(): Medusa checkpoints on the Hub, known by the files they hold and not by their names."""

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
DEADLINE_SECONDS = 6.0  # for all of it; each request has less
UNSURE = 16  # repos whose index or config is read to be sure
EXPAND = ["downloads", "likes", "gated", "siblings", "config", "lastModified"]


@dataclass(frozen=True)
class SearchResult:
    """A repo on the Hub that holds Medusa heads.

    evidence: the file or the entry that says so. gated: its licence must be accepted first.
    """

    id: str
    downloads: int
    likes: int
    gated: bool
    updated: str
    evidence: str


def search(text: str = "") -> list[SearchResult]:
    """Repos with Medusa heads whose id has every word of `text`, most downloaded first.

    Takes DEADLINE_SECONDS at most; the result is kept for last_search. Raises HubError.
    """
    if is_offline():
        why = "the network is off, and this was not searched before"
        raise HubError(f"{why}: see medusa-chat models list", "offline")
    until = time.monotonic() + DEADLINE_SECONDS
    words = text.lower().split()
    infos: dict[str, Any] = {}
    for query in dict.fromkeys(["medusa", " ".join(words) or "medusa"]):
        params = {"search": query, "sort": "downloads", "limit": LIMIT, "expand": EXPAND}
        infos |= {info.id: info for info in list_models(f"the search for {query!r}", **params)}
    infos = {name: info for name, info in infos.items() if all(w in name.lower() for w in words)}
    evidence = {name: _evidence(info) for name, info in infos.items()}
    unsure = [info for name, info in infos.items() if not evidence[name] and _could_be(info)]
    evidence |= _evidence_inside(unsure[:UNSURE], until)
    results = [_result(infos[name], proof) for name, proof in evidence.items() if proof]
    results.sort(key=lambda result: -result.downloads)
    _keep(" ".join(words), results)
    return results


def last_search(text: str = "") -> list[SearchResult]:
    """The result of the last search for `text`, on any day; empty without one. No network."""
    try:
        return [SearchResult(**row) for row in _kept().get(" ".join(text.lower().split()), ())]
    except TypeError:  # written by another version
        return []


def _names(info: Any) -> list[str]:
    return [file.rfilename for file in info.siblings or ()]


def _evidence(info: Any) -> str:
    heads = repo_files.heads_files(_names(info))
    return heads[0] if heads else "config.json" if repo_files.says_medusa(info.config) else ""


def _could_be(info: Any) -> bool:
    """Whether a look into it is worth a request: weights there are, and Medusa in its name."""
    is_named = "medusa" in info.id.lower() or "heads" in info.id.lower()
    return is_named and not info.gated and bool(repo_files.backbone(_names(info)).weights)


def _evidence_inside(infos: list[Any], until: float) -> dict[str, str]:
    """Evidence from the index or the config of each, as far as there is time."""
    pool = ThreadPoolExecutor(4, thread_name_prefix="search")
    try:
        asked = {pool.submit(_evidence_of_files, info): info.id for info in infos}
        done, _ = wait(asked, timeout=max(0.0, until - time.monotonic()))
        return {asked[one]: one.result() for one in done}
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _evidence_of_files(info: Any) -> str:
    names = _names(info)
    proofs = {"config.json": repo_files.says_medusa}
    if index := repo_files.backbone(names).index:
        proofs = {index: repo_files.index_has_heads} | proofs
    for name, is_proof in proofs.items():
        if name in names:
            url = file_url(info.id, "main", name)
            with suppress(HubError):  # not readable: not shown
                if is_proof(ask(info.id, lambda url=url: get(url, timeout=2).json())):
                    return name
    return ""


def _result(info: Any, evidence: str) -> SearchResult:
    updated = info.last_modified.date().isoformat() if info.last_modified else ""
    counts = int(info.downloads or 0), int(info.likes or 0)
    return SearchResult(info.id, *counts, bool(info.gated), updated, evidence)


def _kept() -> dict[str, Any]:
    with suppress(OSError):
        return repo_files.parse_json((paths.cache_dir() / "hub_searches.json").read_bytes())
    return {}


def _keep(words: str, results: list[SearchResult]) -> None:
    kept = _kept() | {words: [asdict(result) for result in results]}
    with suppress(OSError):  # a cache that cannot be written only loses the last search
        paths.write_text(paths.cache_dir() / "hub_searches.json", json.dumps(kept))
