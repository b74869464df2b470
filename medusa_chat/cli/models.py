"""`medusa-chat models`: list, search, download and remove checkpoints."""

import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict
from typing import Annotated, Any

from typer import Argument, Typer

from medusa_chat import paths
from medusa_chat.checkpoints import kept_copies
from medusa_chat.checkpoints.fetch import require_decodable
from medusa_chat.checkpoints.kept_copies import KeptCopy
from medusa_chat.cli.options import (
    AsJson,
    Backbone,
    DataDir,
    HubId,
    Offline,
    prepare_process,
    value,
)
from medusa_chat.cli.terminal import json_line, note, show_download
from medusa_chat.errors import ModelError
from medusa_chat.gguf_files import first_part
from medusa_chat.hub import (
    CachedModel,
    DownloadPlan,
    HubError,
    SearchResult,
    cached,
    last_search,
    plan,
    pull,
    remove,
    search,
)
from medusa_chat.hub.catalog import ModelPreset, model_presets, repo_id_of, repo_of
from medusa_chat.units import gb

# kind of a kept copy -> its key in JSON
KINDS = {"quantised": "quantised", "gguf": "converted", "converted": "from_pickles"}

models = Typer(name="models", help="List, search, download and remove checkpoints.")


@models.command("list")
def list_models(
    offline: Offline = False, data_dir: DataDir = None, as_json: AsJson = False
) -> None:
    """List the checkpoints on this disk, then the recommended ones. Uses no network."""
    prepare_process(data_dir=data_dir, offline=offline)
    here, kept = cached(), kept_copies.kept()
    known = model_presets()
    if as_json:
        rows = {"cached": [cached_row(m) for m in here], "known": [asdict(p) for p in known]}
        show_json(rows | {key: kept_rows(kept, kind) for kind, key in KINDS.items()})
        return
    show(cached_lines(here))
    show(kept_lines(kept))
    show(known_lines(known, {model.id for model in here if model.whole}))


@models.command("search")
def search_models(
    text: Annotated[str, Argument(metavar="TEXT", help="Words in the id.")] = "medusa",
    offline: Offline = False,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Search the Hub for checkpoints with Medusa heads."""
    prepare_process(data_dir=data_dir, offline=offline)
    try:
        results, is_fresh = search(text), True
    except HubError as error:
        results, is_fresh = last_search(text), False
        if not results:
            raise
        note(f"{error}; these are the results of the last search")
    if as_json:
        show_json({"fresh": is_fresh, "found": [asdict(repo) for repo in results]})
        return
    show(result_lines(results))
    if not results:
        raise ModelError(f"no repository matching {text!r} has Medusa heads: try fewer words")


@models.command("pull")
def pull_model(
    repo: HubId,
    backbone: Backbone = None,
    revision: Annotated[str | None, value("NAME", "Branch, tag or refs/pr/N.")] = None,
    offline: Offline = False,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Download a checkpoint and its backbone; verify existing files, and repair damaged ones."""
    prepare_process(data_dir=data_dir, offline=offline)
    needs = plan(repo, revision, backbone)
    for line in plan_lines(needs):
        note(line)
    require_decodable(needs)
    start, fetched = time.monotonic(), 0
    with closing(pull(needs)) as events:
        for event in show_download(events):
            fetched = event.done
    result = pulled_row(needs, fetched, time.monotonic() - start)
    if as_json:
        show_json(result)
        return
    print(f"downloaded {repo} ({gb(needs.total)}); use it with medusa-chat --checkpoint {repo}")


@models.command("rm")
def remove_model(repo: HubId, data_dir: DataDir = None, as_json: AsJson = False) -> None:
    """Delete a downloaded checkpoint and its quantised or converted copies. Your own files stay,
    and so does the backbone, because other checkpoints may use it; for heads that are part of
    medusa-chat, the backbone is deleted."""
    prepare_process(data_dir=data_dir)
    downloaded = repo_of(repo := first_part(repo))  # for shipped heads, the backbone
    freed = sum(kept_copies.remove(name) for name in {repo, downloaded})
    try:
        freed += remove(downloaded)
    except HubError as error:
        if error.kind != "missing" or not freed:
            raise
    if as_json:
        show_json({"id": repo, "freed_bytes": freed})
    else:
        print(f"deleted {repo}: {gb(freed)} freed")


def cached_row(model: CachedModel) -> dict[str, Any]:
    return asdict(model) | {"folder": None if model.folder is None else str(model.folder)}


def pulled_row(needs: DownloadPlan, fetched: int, seconds: float) -> dict[str, Any]:
    return {
        "id": needs.id,
        "base": needs.base,
        "folders": {part.id: str(part.folder) for part in needs.parts},
        "commits": {part.id: part.sha for part in needs.parts},
        "total_bytes": needs.total,
        "fetched_bytes": fetched,
        "seconds": round(seconds, 3),
    }


def cached_lines(here: tuple[CachedModel, ...]) -> Iterator[str]:
    yield "on this disk"
    yield f"  {gb(_shipped_bytes('demo')):>9}  demo  (part of medusa-chat, with Medusa heads)"
    for preset in model_presets():
        if preset.ships:
            size = gb(_shipped_bytes(preset.ships))
            yield f"  {size:>9}  {preset.id}  (heads; part of medusa-chat)"
    for model in here:
        kind = "with Medusa heads" if model.has_heads else "a backbone"
        state = kind if model.whole else "incomplete: run models pull or models rm"
        yield f"  {gb(model.bytes):>9}  {model.id}  ({state})"
    if here:
        yield f"  {gb(sum(model.bytes for model in here)):>9}  in total"


def _shipped_bytes(folder: str) -> int:
    """Bytes of the weights in a folder of assets/."""
    return sum(file.stat().st_size for file in paths.asset(folder).glob("*.safetensors"))


def kept_rows(kept: tuple[KeptCopy, ...], kind: str) -> list[dict[str, Any]]:
    return [asdict(one) | {"folder": str(one.folder)} for one in kept if one.kind == kind]


def kept_lines(kept: tuple[KeptCopy, ...]) -> Iterator[str]:
    """The copies that loads keep, by the model they were made for."""
    if kept:
        yield "converted or quantised copies (medusa-chat models rm deletes them)"
    for one in kept:
        how = "" if one.kind == "quantised" else "converted to "
        old = ", of an earlier version: no longer read" if one.kind == kept_copies.OLD else ""
        yield f"  {gb(one.bytes):>9}  {one.name}  ({how}{one.precision}{old})"


def known_lines(known: tuple[ModelPreset, ...], here: set[str]) -> Iterator[str]:
    yield "recommended (medusa-chat models pull ID)"
    for preset in known:
        parts = [preset.title]
        if preset.base:
            base = f" ({gb(preset.base_bytes)})" if preset.base_bytes else ""
            parts.append(f"base {preset.base}{base}")
        parts += [text for text in ("gated" if preset.gated else "", preset.notes) if text]
        count = preset.base_bytes if preset.ships else preset.bytes
        size = gb(count) if count else "?"
        mark = "*" if repo_id_of(preset.id) in here else " "
        yield f"{mark} {size:>9}  {preset.id}  {'; '.join(parts)}"


def result_lines(results: list[SearchResult]) -> Iterator[str]:
    for repo in results:
        gated = ", gated" if repo.gated else ""
        yield f"{repo.downloads:>9} downloads  {repo.id}  ({repo.evidence}{gated})"


def plan_lines(needs: DownloadPlan) -> Iterator[str]:
    """The planned downloads, one line per repo."""
    for part in needs.parts:
        origin = "backbone " if part.role == "backbone" else ""
        sizes = f"{gb(part.left)} to download of {gb(part.total)}"
        yield f"{origin}{part.id} at {part.sha[:7]}: {sizes}"
    yield from needs.notes


def show(lines: Iterator[str]) -> None:
    for line in lines:
        print(line)


def show_json(value: object) -> None:
    print(json_line(value, indent=2))
