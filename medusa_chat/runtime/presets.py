"""Preset: settings of answers and a system prompt under a name, kept as a TOML file.

Some ship in presets/settings; the user's own are in the data folder and come first.
"""

import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from medusa_chat import paths
from medusa_chat.decoding.settings import SAMPLING, GenerationSettings
from medusa_chat.errors import UsageError
from medusa_chat.messages import Message, without_broken_characters
from medusa_chat.trees.presets import tree_names

NAME = re.compile(r"[^\W_](?:[\w .-]{0,58}[^\W_])?")  # of files on any system, and no "@"
SETTINGS = tuple(one.name for one in fields(GenerationSettings))
TEXTS = ("description", "system")
MAX_BYTES = 200_000


@dataclass(frozen=True)
class Preset:
    """settings: those that it sets, by the names of GenerationSettings. system: the system prompt
    of conversations that have none. description: one line. Raises UsageError, in one line."""

    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    system: str = ""
    description: str = ""

    def __post_init__(self) -> None:
        if not NAME.fullmatch(self.name):
            raise UsageError(
                f"the preset's name is {self.name!r:.80}: give 1 to 60 letters, digits, spaces, "
                "dots and hyphens, with a letter or a digit first and last"
            )
        try:
            self._check()
        except UsageError as error:
            raise UsageError(f"preset {self.name}: {error}") from None

    def _check(self) -> None:
        for name in TEXTS:
            if not isinstance(text := getattr(self, name), str):
                raise UsageError(f"{name} is {text!r:.80}: give a text")
        for name in self.settings:
            if name not in SETTINGS:
                known = ", ".join((*TEXTS, *SETTINGS))
                raise UsageError(f"unknown setting {name!r:.80}: give some of {known}")
        settings = GenerationSettings.from_json(dict(self.settings))
        if settings.tree not in ("auto", *tree_names()):
            names = ", ".join(("auto", *tree_names()))
            raise UsageError(f"tree is {settings.tree!r:.80}: give one of {names}")

    @classmethod
    def of(cls, name: str, settings: GenerationSettings, system: str = "") -> "Preset":
        """A preset of whole settings: what is as it is without any is left out, but for sampling,
        of which a model may have defaults of its own."""
        plain = asdict(GenerationSettings())
        values = {
            key: list(value) if key == "stop" else value
            for key, value in asdict(settings).items()
            if key in SAMPLING or value != plain[key]
        }
        return cls(name, values, system)

    @classmethod
    def read(cls, name: str, text: str) -> "Preset":
        """The preset of a TOML file's text. Raises UsageError."""
        if len(text.encode("utf-8", "replace")) > MAX_BYTES:
            raise UsageError(f"preset {name}: the file is larger than {MAX_BYTES // 1000} kB")
        try:
            values = tomllib.loads(without_broken_characters(text.removeprefix("\ufeff")))
        except (ValueError, RecursionError) as error:
            raise UsageError(f"preset {name} is not TOML: {error}") from None
        told = {key: values.pop(key) for key in TEXTS if key in values}
        return cls(name, values, **told)

    def before(self, messages: Sequence[Message]) -> list[Message]:
        """A conversation behind the system prompt, unless it begins with one of its own."""
        has_own = bool(messages) and messages[0]["role"] == "system"
        own: list[Message] = [{"role": "system", "content": self.system}]
        return [*(own if self.system and not has_own else []), *messages]

    def to_toml(self) -> str:
        """The preset as a file's text, which `read` reads."""
        values = {"description": self.description, "system": self.system, **self.settings}
        lines = [
            f"{key} = {_toml(value)}" for key, value in values.items() if value not in ("", None)
        ]
        return "".join(f"{line}\n" for line in lines)


def preset_names() -> tuple[str, ...]:
    """Names of all presets, sorted."""
    return tuple(sorted({*_files(paths.preset("settings")), *own_names()}))


def own_names() -> tuple[str, ...]:
    """Names of the user's own presets, sorted."""
    return tuple(sorted(_files(_own_folder())))


def shipped_names() -> tuple[str, ...]:
    """Names of the presets that ship, sorted."""
    return tuple(sorted(_files(paths.preset("settings"))))


def load_preset(name: str, ships: bool = False) -> Preset:
    """A preset by its name, the user's own before one that ships. ships: only those that ship.
    Raises UsageError."""
    own = {} if ships else _files(_own_folder())
    file = own.get(name) or _files(paths.preset("settings")).get(name)
    if file is None:
        raise UsageError(
            f"there is no preset {name!r:.80}: choose one of {', '.join(preset_names())}"
        )
    return _of_file(file)


def find_preset(name: str) -> Preset:
    """A preset by its name or the path of a TOML file. Raises UsageError."""
    return _of_file(Path(name).expanduser()) if name.endswith(".toml") else load_preset(name)


def save_preset(preset: Preset) -> None:
    """Keep a preset as one of the user's own, in place of one of its name. Raises UsageError."""
    file = _own_folder() / f"{preset.name}.toml"
    try:
        paths.write_text(file, preset.to_toml())
    except OSError as error:
        raise UsageError(
            f"preset {preset.name} cannot be written to {file.parent}: {error.strerror or error}"
        ) from None


def delete_preset(name: str) -> None:
    """Delete one of the user's own presets. Raises UsageError."""
    file = _files(_own_folder()).get(name)
    if file is None:
        ships = name in _files(paths.preset("settings"))
        why = "it ships with medusa-chat" if ships else "there is none of this name"
        raise UsageError(f"preset {name!r:.80} cannot be deleted: {why}")
    try:
        file.unlink(missing_ok=True)
    except OSError as error:
        raise UsageError(f"preset {name} cannot be deleted: {error.strerror or error}") from None


def _own_folder() -> Path:
    return paths.data_dir() / "presets"


def _files(folder: Path) -> dict[str, Path]:
    """The presets of a folder, by name."""
    return {file.stem: file for file in folder.glob("*.toml") if NAME.fullmatch(file.stem)}


def _of_file(file: Path) -> Preset:
    try:
        with open(file, "rb") as stream:
            data = stream.read(MAX_BYTES + 1)
        return Preset.read(file.stem, data.decode())
    except UnicodeDecodeError:
        raise UsageError(f"preset {file.stem} is not UTF-8 text: {file}") from None
    except (OSError, ValueError) as error:
        raise UsageError(
            f"preset {str(file)!r:.200} cannot be read: {getattr(error, 'strerror', '') or error}"
        ) from None


def _toml(value: Any) -> str:
    """A value in TOML: JSON but for long texts, whose lines stay lines."""
    if isinstance(value, str) and "\n" in value:
        lines = [json.dumps(line, ensure_ascii=False)[1:-1] for line in value.split("\n")]
        text = '"""\n' + "\n".join(lines) + '"""'
    else:
        text = json.dumps(value, ensure_ascii=False)
    return text.replace("\x7f", "\\u007f")
