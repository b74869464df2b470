"""ModelPreset: the known checkpoints and drafters in presets/models.toml, and chat templates."""

import functools
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from medusa_chat import paths
from medusa_chat.gguf_files import split_name

LAYOUTS = ("A", "B", "C", "E", "F", "G", "I", "J")


@dataclass(frozen=True)
class ModelPreset:
    """A known checkpoint, listed without asking the Hub. None means: unknown.

    id: its Hub id, or the name of heads that are part of medusa-chat. base: the backbone's repo, or
    a GGUF file of one (owner/name/FILE.gguf); None if the checkpoint contains its own. ships: for
    heads that are part of medusa-chat, their folder in assets/. layout: one of LAYOUTS. heads: the
    number in the file, whatever its config says. bytes: of the checkpoint; base_bytes: of the
    base's weights. licence: of the backbone's weights. chat_template: a name for chat_template(),
    if the repo has no template. revision: to download, None for main. shape: a name for shape().
    checked: whether the entry was compared with the repo on the Hub.
    """

    id: str
    title: str
    layout: str
    base: str | None = None
    heads: int | None = None
    bytes: int | None = None
    base_bytes: int | None = None
    licence: str | None = None
    gated: bool | None = None
    chat_template: str | None = None
    revision: str | None = None
    shape: str | None = None
    ships: str | None = None
    checked: bool = False
    notes: str = ""

    @property
    def download_bytes(self) -> int | None:
        """Bytes to download from both repos; None if unknown."""
        if self.ships:
            return self.base_bytes
        return self.bytes + (self.base_bytes or 0) if self.bytes else None


@functools.cache
def model_presets() -> tuple[ModelPreset, ...]:
    """All presets, in the order of the file. No network."""
    return tuple(ModelPreset(**row) for row in _file()["model"])


@dataclass(frozen=True)
class KnownDrafter:
    """A drafter for --draft. id: its Hub id; kind: in words; of: the repos of the models that it
    was made for."""

    id: str
    kind: str
    of: tuple[str, ...]


STORED = re.compile(r"(-GGUF|[-._](UD-)?(I?Q\d|BF16|F16|MXFP4)[\w.-]*)", re.IGNORECASE)


def known_drafters(backbone: str) -> tuple[KnownDrafter, ...]:
    """The known drafters of a backbone: its Hub id, or the name of a repo, folder or file with a
    GGUF of it, which begins with the model's own name. No network."""
    last = re.split(r"[/\\]", backbone)[-1].removesuffix(".gguf")
    names = {backbone.lower(), last.lower(), STORED.sub("", last).lower()}
    return tuple(
        one
        for one in _drafters()
        if any(names & {repo.lower(), repo.rpartition("/")[2].lower()} for repo in one.of)
    )


@functools.cache
def _drafters() -> tuple[KnownDrafter, ...]:
    return tuple(
        KnownDrafter(d["id"], d["kind"], tuple(d["of"])) for d in _file().get("drafter", ())
    )


@functools.cache
def shape(name: str) -> Mapping[str, Any]:
    """The sizes of a backbone, as in a config.json, by the name of a [shapes] entry."""
    sizes: Mapping[str, Any] = _file()["shapes"][name]
    return sizes


def _file() -> dict[str, Any]:
    return tomllib.loads(paths.preset("models.toml").read_text("utf-8"))


def model_preset(repo: str) -> ModelPreset | None:
    """The preset of an id, ignoring case."""
    return next((p for p in model_presets() if p.id.lower() == repo.lower()), None)


def repo_of(name: str) -> str:
    """What is downloaded from the Hub, a repo or a GGUF file of one: for heads that are part of
    medusa-chat their base, else `name`."""
    preset = model_preset(name)
    return preset.base if preset and preset.ships and preset.base else name


def repo_id_of(name: str) -> str:
    """The repo alone of `repo_of`."""
    return split_name(repo_of(name))[0]


class KnownTemplate(NamedTuple):
    """The chat template (Jinja) that we supply for a repo without one."""

    repo: str
    text: str


def known_template(*repos: str | None) -> KnownTemplate | None:
    """The template for the first of these repos that is a preset, or the base of one, with one."""
    for repo in filter(None, repos):
        for preset in model_presets():
            ids = (preset.id.lower(), (preset.base or "").lower())
            if preset.chat_template and repo.lower() in ids:
                return KnownTemplate(repo, chat_template(preset.chat_template))
    return None


def chat_template(name: str) -> str:
    """The Jinja text of presets/templates/NAME.jinja."""
    return paths.preset("templates", f"{name}.jinja").read_text("utf-8").rstrip("\n")
