"""presets/models.toml and presets/templates/ -> ModelPreset: checkpoints known to be good."""

import functools
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from medusa_chat import paths

LAYOUTS = ("A", "B", "C", "E", "F", "G", "I", "J")


@dataclass(frozen=True)
class ModelPreset:
    """A checkpoint that is known, shown before the Hub is asked.

    id: of the Hub, or the name of heads that come with medusa-chat. base: the backbone's repo, None
    where the checkpoint holds its own. ships: the folder of assets/ with such heads, else None.
    layout: one of LAYOUTS.
    heads: how many the file holds, whatever its config says. bytes: of the checkpoint itself;
    base_bytes: of the base's weights. licence: of the backbone's weights. chat_template: a name
    for chat_template(), where the repo has none. revision: what to download, None for main.
    shape: a name for shape(), the sizes of the backbone. checked: whether the entry was compared
    with the live repo. None elsewhere: not known for sure.
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
        """Bytes to fetch of both repos; None where that is not known."""
        if self.ships:
            return self.base_bytes
        return self.bytes + (self.base_bytes or 0) if self.bytes else None


@functools.cache
def model_presets() -> tuple[ModelPreset, ...]:
    """All of them, in the order of the file. Needs no network."""
    return tuple(ModelPreset(**row) for row in _file()["model"])


@functools.cache
def shape(name: str) -> Mapping[str, Any]:
    """What a config.json says of a backbone's sizes, by its name here."""
    found: Mapping[str, Any] = _file()["shapes"][name]
    return found


def _file() -> dict[str, Any]:
    return tomllib.loads(paths.preset("models.toml").read_text("utf-8"))


def model_preset(repo: str) -> ModelPreset | None:
    """The preset of a Hub id; ids differ in case only by mistake."""
    return next((p for p in model_presets() if p.id.lower() == repo.lower()), None)


def repo_of(name: str) -> str:
    """The Hub repo that is fetched for a name: the base of heads that ship, else itself."""
    preset = model_preset(name)
    return preset.base if preset and preset.ships and preset.base else name


class KnownTemplate(NamedTuple):
    """The Jinja text for a repo that has no chat template of its own."""

    repo: str
    text: str


def known_template(*repos: str | None) -> KnownTemplate | None:
    """The template of the first of these repos that we have one for, by its id or as a base."""
    for repo in filter(None, repos):
        for preset in model_presets():
            ids = (preset.id.lower(), (preset.base or "").lower())
            if preset.chat_template and repo.lower() in ids:
                return KnownTemplate(repo, chat_template(preset.chat_template))
    return None


def chat_template(name: str) -> str:
    """The Jinja text of presets/templates/NAME.jinja."""
    return paths.preset("templates", f"{name}.jinja").read_text("utf-8").rstrip("\n")
