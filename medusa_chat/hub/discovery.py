"""search(): Medusa checkpoints on the Hub, told by the files they hold and not by their names."""

import json
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass
from typing import Any

from medusa_chat import paths
from medusa_chat.hub import repo_files
from medusa_chat.hub.cache import read_json
from medusa_chat.hub.client import get
from medusa_chat.hub.environment import is_offline
from medusa_chat.hub.errors import HubError
from medusa_chat.hub.repo_files import is_repo_id

LIMIT = 200
DEADLINE_SECONDS = 6.0  # for all of it; each request has less
UNSURE = 16  # repos whose index or config is read to be sure
EXPAND = ["downloads", "likes", "gated", "siblings", "config", "lastModified"]
KEPT_SEARCHES = 50


@dataclass(frozen=True)
class Found:
    """A repo on the Hub that holds Medusa heads.

    evidence: the file or the entry that says so. gated: its licence must be accepted first.
    """

    id: str
    downloads: int
    likes: int
    gated: bool
    updated: str
    evidence: str


def search(text: str = "") -> list[Found]:
    """Repos with Medusa heads whose id has every word of `text`, most downloaded first.

    Takes DEADLINE_SECONDS at most; what was found is kept for last_search. Raises HubError.
    """
    if is_offline():
        why = "the network is off, and this was not searched before"
        raise HubError(f"{why}: see medusa-chat models list", "offline")
    until = time.monotonic() + DEADLINE_SECONDS
    words = text.lower().split()
    rows = _rows(words)
    wanted = [row for row in rows.values() if all(word in row["id"].lower() for word in words)]
    told = {row["id"]: _evidence(row) for row in wanted}
    unsure = [row for row in wanted if not told[row["id"]] and _could_be(row)][:UNSURE]
    told |= _evidence_inside(unsure, until)
    found = [_found(row, told[row["id"]]) for row in wanted if told[row["id"]]]
    found.sort(key=lambda repo: -repo.downloads)
    _keep(text, found)
    return found


def last_search(text: str = "") -> list[Found]:
    """What the last search for `text` found, on any day; empty when there was none. No network."""
    try:
        return [Found(**row) for row in _kept().get(_key(text), ())]
    except TypeError:  # written by another version
        return []


def _rows(words: list[str]) -> dict[str, dict[str, Any]]:
    """What the Hub lists for "medusa" and for the words, by id; malformed rows left out."""
    questions = dict.fromkeys(["medusa", " ".join(words) or "medusa"])
    rows: dict[str, dict[str, Any]] = {}
    for question in questions:
        asked = {"search": question, "sort": "downloads", "limit": LIMIT, "expand": EXPAND}
        try:
            answer = get("api/models", f"the search for {question!r}", asked).json()
        except ValueError as error:
            raise HubError("the Hub's answer is not JSON: try again later", "broken") from error
        for row in answer if isinstance(answer, list) else ():
            if isinstance(row, dict) and is_repo_id(row.get("id")):
                rows.setdefault(row["id"], row)
    return rows


def _names(row: Mapping[str, Any]) -> list[str]:
    siblings = row.get("siblings")
    found = [s.get("rfilename") for s in siblings or () if isinstance(s, dict)]
    return [name for name in found if repo_files.is_safe(name)]


def _evidence(row: Mapping[str, Any]) -> str:
    heads = repo_files.heads_files(_names(row))
    if heads:
        return heads[0]
    return "config.json" if repo_files.says_medusa(row.get("config")) else ""


def _could_be(row: Mapping[str, Any]) -> bool:
    """Whether a look into it is worth a request: weights there are, and Medusa in its name."""
    named = "medusa" in row["id"].lower() or "heads" in row["id"].lower()
    return named and not row.get("gated") and bool(repo_files.weight_files(_names(row)))


def _evidence_inside(rows: list[dict[str, Any]], until: float) -> dict[str, str]:
    """Evidence from the index or the config of each, as far as there is time."""
    pool = ThreadPoolExecutor(4, thread_name_prefix="search")
    try:
        asked = {pool.submit(_evidence_of_files, row): row["id"] for row in rows}
        done, _ = wait(asked, timeout=max(0.0, until - time.monotonic()))
        return {asked[one]: one.result() for one in done}
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _evidence_of_files(row: Mapping[str, Any]) -> str:
    names = _names(row)
    index = repo_files.index_file(names)
    for name, is_proof in (
        (index, repo_files.index_has_heads),
        ("config.json", repo_files.says_medusa),
    ):
        if name is None or name not in names:
            continue
        try:
            if is_proof(get(f"{row['id']}/resolve/main/{name}", row["id"], timeout=2).json()):
                return name
        except (HubError, ValueError):
            continue  # not to be had: not shown
    return ""


def _found(row: Mapping[str, Any], evidence: str) -> Found:
    return Found(
        id=row["id"],
        downloads=_count(row.get("downloads")),
        likes=_count(row.get("likes")),
        gated=bool(row.get("gated")),
        updated=str(row.get("lastModified") or "")[:10],
        evidence=evidence,
    )


def _count(value: Any) -> int:
    return value if type(value) is int and value >= 0 else 0


def _key(text: str) -> str:
    return " ".join(text.lower().split())


def _kept() -> dict[str, Any]:
    return read_json(paths.cache_dir() / "hub_searches.json")


def _keep(text: str, found: list[Found]) -> None:
    others = [(key, rows) for key, rows in _kept().items() if key != _key(text)]
    kept = dict([*others[-KEPT_SEARCHES:], (_key(text), [asdict(repo) for repo in found])])
    try:
        paths.write_text(paths.cache_dir() / "hub_searches.json", json.dumps(kept))
    except OSError:
        pass  # a cache that cannot be written is only slower next time
