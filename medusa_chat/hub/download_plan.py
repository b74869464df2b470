"""plan(): the files that a checkpoint needs from the Hub, and how many bytes are missing.

dry_run of huggingface_hub 2.4 sends a request for every file, and reports neither hashes nor
partial files; HfApi.model_info has all sizes and hashes in one response.
"""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from medusa_chat.gguf_files import choose_file, is_gguf, parts_of, split_name
from medusa_chat.hub import repo_files
from medusa_chat.hub.cache import MAX_JSON, cache_folder, size_of, snapshot_folder, storage
from medusa_chat.hub.catalog import model_preset
from medusa_chat.hub.client import HubError
from medusa_chat.hub.repo import Repo, RepoFile, access_refusal, read, repo_info
from medusa_chat.hub.repo_files import is_repo_id, parse_json
from medusa_chat.units import gb


@dataclass(frozen=True)
class RepoPlan:
    """The files needed from one repo. role: "model" (all of it), "heads" or "backbone".

    left: bytes to download, without what is cached. refusal: why this user has no access yet.
    config: its config merged with a LoRA adapter's; {} without access. named: the GGUF file that
    was requested; note: if none was, which one was chosen and why.
    """

    id: str
    revision: str
    sha: str
    role: str
    files: tuple[RepoFile, ...]
    left: int
    gated: bool = False
    refusal: HubError | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    named: str | None = None
    note: str = ""

    @property
    def name(self) -> str:
        """The id it was requested by, including a GGUF file."""
        return f"{self.id}/{self.named}" if self.named else self.id

    @property
    def total(self) -> int:
        return sum(file.size for file in self.files)

    @property
    def folder(self) -> Path:
        """The snapshot that will have its files."""
        return snapshot_folder(self.id, self.sha)


@dataclass(frozen=True)
class DownloadPlan:
    """The repos needed to load a checkpoint: its own and, unless it contains a backbone, its base.

    base: the backbone's repo; None if the checkpoint contains a backbone or names none. total:
    bytes of all files; left: of those not in the cache.
    """

    id: str
    parts: tuple[RepoPlan, ...]
    base: str | None = None
    note: str = ""

    @property
    def notes(self) -> tuple[str, ...]:
        return tuple(filter(None, (self.note, *(part.note for part in self.parts))))

    @property
    def total(self) -> int:
        return sum(part.total for part in self.parts)

    @property
    def left(self) -> int:
        return sum(part.left for part in self.parts)

    @property
    def gated(self) -> bool:
        return any(part.gated for part in self.parts)

    @property
    def refusal(self) -> HubError | None:
        """Why the download cannot start: no access to a repo, or a full disk."""
        for part in self.parts:
            if part.refusal is not None and part.left:
                return part.refusal
        if self.left <= (free := _free_bytes()):
            return None
        disk = f"the disk of {cache_folder()} has {gb(free)} free"
        then = "free some space, remove a model (medusa-chat models rm), or set HF_HOME"
        return HubError(f"{self.id} needs {gb(self.left)}, but {disk}: {then}", "disk")


def plan(repo: str, revision: str | None = None, backbone: str | None = None) -> DownloadPlan:
    """Plan the download of everything that loading `repo` needs. Raises HubError.

    revision: None for the preset's, else main. backbone: a repo to use instead of the checkpoint's
    base; a local folder needs no download. For heads that are part of medusa-chat, the base only.
    """
    preset = model_preset(repo)
    if preset is not None and preset.ships:
        base = backbone or preset.base
        if base is None or not _is_on_hub(base):
            return DownloadPlan(repo, ())
        return DownloadPlan(repo, (plan_repo(base, revision, "backbone"),), base)
    own = plan_repo(repo, revision)
    if own.role == "model":
        if backbone:
            why = "its heads were trained with it"
            raise HubError(f"{repo} has its own backbone ({why}): omit --backbone", "refused")
        return DownloadPlan(repo, (own,))
    base = backbone or (preset and preset.base) or _base_in(own.config, repo)
    if base is None:
        note = f"{repo} does not name a backbone: choose one with --backbone"
        return DownloadPlan(repo, (own,), note=note)
    if not _is_on_hub(base):
        return DownloadPlan(repo, (own,), base)
    try:
        return DownloadPlan(repo, (own, plan_repo(base, role="backbone")), base)
    except HubError as error:
        if backbone or error.kind != "missing":
            raise
        note = f"its config names the base {base}: {error}; choose one with --backbone"
        return DownloadPlan(repo, (own,), note=note)


def plan_repo(repo: str, revision: str | None = None, role: str | None = None) -> RepoPlan:
    """Plan the download of one repo, without its base. Raises HubError.

    repo: an id, or one of its GGUF files (owner/name/FILE.gguf). role: "backbone" excludes heads;
    None: depends on its files.
    """
    repo_id, named = split_name(repo)
    preset = model_preset(repo_id)
    at = repo_info(repo_id, revision or (preset.revision if preset else None))
    refusal = access_refusal(at)
    config: dict[str, Any] = {}
    note = ""
    if named or _is_gguf_repo(at, role):
        role = role or "model"
        needed, note = _gguf_parts(at, named)
    else:
        config, index = ({}, None) if refusal else _settings(at)
        role = role or _role(at, None if refusal else config)
        needed = _needed(at, role, index)
    files = tuple(file for file in at.files if file.name in needed)
    return RepoPlan(
        id=at.id,
        revision=at.revision,
        sha=at.sha,
        role=role,
        files=files,
        left=sum(_left(at, file) for file in {file.blob: file for file in files}.values()),
        gated=at.gated,
        refusal=refusal,
        config=config,
        named=named,
        note=note,
    )


def _base_in(config: Mapping[str, Any], repo: str) -> str | None:
    """The base named in the config of heads."""
    for key in ("base_model_name_or_path", "_name_or_path"):
        name = config.get(key)
        owner_and_name = split_name(name)[0] if isinstance(name, str) else ""
        if is_repo_id(owner_and_name) and "/" in owner_and_name and name != repo:
            return str(name)
    return None


def _is_on_hub(base: str) -> bool:
    return is_repo_id(split_name(base)[0]) and not Path(base).expanduser().exists()


def _free_bytes() -> int:
    """Free bytes on the disk of the cache."""
    folder = cache_folder().resolve()
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def _is_gguf_repo(repo: Repo, role: str | None) -> bool:
    """Whether to read a GGUF file: the repo has neither other weights nor (separate) heads."""
    has_heads = role is None and bool(repo_files.heads_files(repo.sizes))
    if has_heads or repo_files.backbone(repo.sizes).weights:
        return False
    return choose_file(repo.sizes)[0] is not None


def _gguf_parts(repo: Repo, named: str | None) -> tuple[set[str], str]:
    """(the parts of one GGUF file, why it was chosen)."""
    chosen, note = (named, "") if named else choose_file(repo.sizes)
    parts = parts_of(chosen or "")
    if missing := [part for part in parts if part not in repo.sizes]:
        others = [name for name in repo.sizes if is_gguf(name)][:5]
        hint = f"it has {', '.join(others)}" if others else "it has no GGUF file"
        raise HubError(f"{repo.id} has no {missing[0]}: {hint}", "missing")
    return set(parts), note


def _settings(repo: Repo) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """(config merged with a LoRA adapter's, index of the weights if there is one)."""
    config: dict[str, Any] = {}
    backbone = repo_files.backbone(repo.sizes)
    for name in dict.fromkeys(("adapter_config.json", "config.json", backbone.config)):
        config |= _json(repo, name)
    return config, _json(repo, backbone.index) if backbone.index else None


def _role(repo: Repo, config: Mapping[str, Any] | None) -> str:
    """The role of a repo. config: None without access."""
    if config is None:
        is_model = not repo_files.heads_files(repo.sizes)
    else:  # some heads are published as model.safetensors
        is_model = isinstance(kind := config.get("model_type"), str) and kind != "medusa"
    return "model" if is_model and repo_files.backbone(repo.sizes).weights else "heads"


def _needed(repo: Repo, role: str, index: Mapping[str, Any] | None) -> set[str]:
    """The names of the files to download. Raises HubError if weights or heads are missing."""
    backbone = repo_files.backbone(repo.sizes, index)
    heads = repo_files.heads_files(repo.sizes)
    needed: set[str] = set()
    if role != "heads":
        needed |= {*backbone.weights, *backbone.beside}
    if role != "backbone":
        needed |= set(repo_files.files_of_heads(repo.sizes))
    if role == "heads" and not heads:
        needed |= set(backbone.weights)
    if missing := sorted(needed - set(repo.sizes)):
        what = f"{repo.id} is incomplete: {missing[0]}, listed in its index, is missing"
        raise HubError(f"{what}; ask its owner to add it", "broken")
    if not backbone.weights and not (role == "heads" and heads):
        what = f"{repo.id} has neither Medusa heads nor weights in safetensors, .bin or GGUF"
        then = "choose another repository (see medusa-chat models search)"
        raise HubError(f"{what}: {then}", "refused")
    return needed


def _json(repo: Repo, name: str) -> dict[str, Any]:
    """A JSON file of at most MAX_JSON bytes; {} if there is none."""
    size = repo.sizes.get(name, 0)
    return parse_json(read(repo, name, 0, size)) if size <= MAX_JSON else {}


def _left(repo: Repo, file: RepoFile) -> int:
    """Bytes to download: 0 if the file is cached, the rest if it is partial."""
    blob = storage(repo.id) / "blobs" / file.blob
    if file.size in (size_of(blob), size_of(snapshot_folder(repo.id, repo.sha) / file.name)):
        return 0
    partial = size_of(blob.with_name(f"{file.blob}.incomplete"))
    return file.size - partial if 0 < partial <= file.size else file.size
