"""A preset as the settings that the page has, and a page's settings as a preset. No gradio."""

from collections.abc import Mapping, Sequence
from typing import Any

from medusa_chat.errors import UsageError
from medusa_chat.runtime.presets import Preset, load_preset, own_names, preset_names, shipped_names
from medusa_chat.ui.page.inputs import Inputs, follows
from medusa_chat.ui.page.settings_form import refusal

SAME = 5e-4  # between two deltas: the page shows three digits


def offered(is_guest: bool) -> tuple[str, ...]:
    """Names of the presets that somebody may pick: the owner's own are not for guests."""
    return shipped_names() if is_guest else preset_names()


def chosen(name: object, is_guest: bool) -> Preset:
    """A preset that was picked. Raises UsageError."""
    if not name:
        raise UsageError("pick a preset first")
    if not isinstance(name, str) or name not in offered(is_guest):
        raise UsageError(f"there is no preset {name!r:.80}: pick one of the list")
    return load_preset(name, ships=is_guest)


def settings_of(preset: Preset, base: Mapping[str, Any], trees: Sequence[str]) -> dict[str, Any]:
    """The settings that a page shows, by name, with "vanilla" for plain decoding. base: those that
    the preset does not name. Raises UsageError for what the page cannot show."""
    told = preset.settings
    values = {**base, **told}
    if "drafter" in told:
        is_plain = told["drafter"] == "none"
        values["drafter"] = "auto" if is_plain or told["drafter"] is None else told["drafter"]
        values["vanilla"] = is_plain
    if told.get("seed") is not None:
        values["seed"] = str(told["seed"])
    stops = told.get("stop", ())
    if any("\n" in text or "\r" in text for text in stops):
        raise UsageError(f"preset {preset.name}: no stop string on the page has a line break")
    if "stop" in told:
        values["stop"] = "\n".join(stops)
    if {"posterior_threshold", "posterior_alpha"} & told.keys():
        delta = follows(values["posterior_threshold"])
        values["locked"] = abs(values["posterior_alpha"] - delta) < SAME
    for name, value in values.items():
        if name != "vanilla" and (wrong := refusal(name, value, trees)):
            raise UsageError(f"preset {preset.name}: {wrong}")
    return values


def preset_of(name: object, inputs: Inputs) -> Preset:
    """A preset of the settings that a page shows. Raises UsageError."""
    if not isinstance(name, str) or not name.strip():
        raise UsageError("give the preset a name: letters, digits, spaces, dots and hyphens")
    return Preset.of(" ".join(name.split()), inputs.settings, inputs.system)


def is_own(name: str) -> bool:
    """Whether a preset is one of the user's own, which can be deleted."""
    return name in own_names()
