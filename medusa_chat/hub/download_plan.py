"""plan(): what loading a checkpoint needs from the Hub, to the byte, before the first is fetched.

huggingface_hub 2.4's dry_run asks for every file by itself and knows neither hashes nor what a
download that broke off has left; HfApi.model_info tells all sizes and hashes in one answer.
"""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from medusa_chat.gguf_files import split_name
from medusa_chat.hub.cache import cache_folder
from medusa_chat.hub.catalog import model_preset
from medusa_chat.hub.errors import HubError
from medusa_chat.hub.repo_files import is_repo_id
from medusa_chat.hub.repo_plan import RepoPlan, plan_repo
from medusa_chat.units import gb


@dataclass(frozen=True)
class DownloadPlan:
    """What is needed to load a checkpoint: its own repo, then its base's where it holds none.

    total: bytes of everything needed; left: of what is not in the cache; free: on the disk.
    base: the backbone's repo, None where the checkpoint holds its own or names none (see notes).
    """

    id: str
    parts: tuple[RepoPlan, ...]
    base: str | None
    free: int
    notes: tuple[str, ...] = ()

    @property
    def total(self) -> int:
        return sum(part.total for part in self.parts)

    @property
    def left(self) -> int:
        return sum(part.left for part in self.parts)

    @property
    def fits(self) -> bool:
        """Whether the disk has room for what is left."""
        return self.left <= self.free

    @property
    def gated(self) -> bool:
        return any(part.gated for part in self.parts)

    @property
    def refusal(self) -> HubError | None:
        """The first reason why the download cannot begin, the disk included."""
        for part in self.parts:
            if part.refusal is not None and part.left:
                return part.refusal
        return None if self.fits else _disk_full(self)


def plan(repo: str, revision: str | None = None, backbone: str | None = None) -> DownloadPlan:
    """What to fetch so that `repo` can be loaded: of heads that ship, the base. Raises HubError.

    revision: None takes the preset's, else main. backbone: a repo to use instead of the base that
    the checkpoint names; a local folder needs no download.
    """
    preset = model_preset(repo)
    if preset is not None and preset.ships:
        return _of_shipped(repo, backbone or preset.base, revision)
    own, config = plan_repo(repo, revision)
    if backbone and own.role == "model":
        raise HubError(
            f"{repo} holds its own backbone, trained together with its heads: omit --backbone",
            "refused",
        )
    parts, notes = [own], []
    base = backbone or (_base(repo, config) if own.role == "heads" else None)
    if base is None and own.role == "heads":
        notes.append(f"{repo} does not name a backbone: choose one with --backbone")
    notes += [own.note] if own.note else []
    if base is not None and _is_of_hub(base):
        try:
            part, _ = plan_repo(base, None, role="backbone")
            parts.append(part)
            notes += [part.note] if part.note else []
        except HubError as error:
            if backbone or error.kind != "missing":
                raise
            notes.append(f"its config names the base {base}: {error}; choose one with --backbone")
            base = None
    return DownloadPlan(repo, tuple(parts), base, free_bytes(), tuple(notes))


def _of_shipped(name: str, base: str | None, revision: str | None) -> DownloadPlan:
    """Heads come with medusa-chat: only their base is fetched, where it is on the Hub."""
    if base is None or not _is_of_hub(base):
        return DownloadPlan(name, (), None, free_bytes())
    part, _ = plan_repo(base, revision, role="backbone")
    return DownloadPlan(name, (part,), base, free_bytes(), (part.note,) if part.note else ())


def free_bytes() -> int:
    """Free bytes on the disk of the cache."""
    folder = cache_folder().resolve()
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def _base(repo: str, config: Mapping[str, Any]) -> str | None:
    """The base that heads belong to: the preset knows better than a config."""
    preset = model_preset(repo)
    if preset and preset.base:
        return preset.base
    for key in ("base_model_name_or_path", "_name_or_path"):
        name = config.get(key)
        found = split_name(name)[0] if isinstance(name, str) else ""
        if is_repo_id(found) and "/" in found and name != repo:
            return str(name)
    return None


def _is_of_hub(base: str) -> bool:
    return is_repo_id(split_name(base)[0]) and not Path(base).expanduser().exists()


def _disk_full(plan: DownloadPlan) -> HubError:
    return HubError(
        f"{plan.id} needs {gb(plan.left)} more and the disk of {cache_folder()} has "
        f"{gb(plan.free)}: free some, remove a model with medusa-chat models rm, or set HF_HOME",
        "disk",
    )
