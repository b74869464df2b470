"""SettingsForm: the widgets' border, where what an event posted becomes checked settings."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import gradio as gr

from medusa_chat.errors import MedusaChatError
from medusa_chat.ui.page.html_blocks import event_field
from medusa_chat.ui.page.inputs import Inputs, checked, from_browser

Posted = Mapping[gr.components.Component, Any]  # what an event posted, by component
Act = Callable[[Any, Inputs], Any]
Refuse = Callable[[Any, MedusaChatError], Any]


@dataclass(frozen=True)
class SettingsForm:
    """The components of the settings by name, and what reads what they posted.

    trees: names of presets that may be chosen beside "auto". defaults: of what a browser keeps.
    """

    components: Mapping[str, gr.components.Component]
    trees: Sequence[str]
    defaults: Mapping[str, Any]

    def handler(
        self, act: Act, refuse: Refuse, tab: gr.State, **sources: gr.components.Component | str
    ) -> Callable[[Posted, gr.EventData], Any]:
        """What an event that decodes runs: `act` gets the tab and its checked inputs, `refuse` the
        tab and the UsageError of what was posted. sources: where an input that is no setting
        comes from: a component, or the name of a field of the event."""

        def handle(posted: Posted, event: gr.EventData) -> Any:
            fields = {
                name: event_field(event, source) if isinstance(source, str) else posted[source]
                for name, source in sources.items()
            }
            try:
                inputs = checked(self.named(posted) | fields, self.trees)
            except MedusaChatError as error:
                return refuse(posted[tab], error)
            return act(posted[tab], inputs)

        return handle

    @property
    def base(self) -> dict[str, Any]:
        """The value that a setting has where none is given."""
        return dict(self.defaults)

    def named(self, posted: Posted) -> dict[str, object]:
        """The posted values, by the settings' names."""
        return {name: posted[made] for name, made in self.components.items() if made in posted}

    def valid(self, posted: Posted) -> dict[str, Any]:
        """The settings that were posted, a default where one is wrong."""
        return self.restored(self.named(posted))

    def restored(self, stored: object) -> dict[str, Any]:
        """Settings of a conversation, or what a browser remembered as JSON, each value checked; a
        default where one is missing or wrong."""
        values = self.base
        for name, value in (stored if isinstance(stored, dict) else from_browser(stored)).items():
            if name in values and not refusal(name, value, self.trees):
                values[name] = value
        return values


def touched(component: Any) -> list[Any]:
    """The events of a value that a person changes. Gradio's text box tells `input` for a key that
    writes a character, not for Backspace, a paste or a drop: leaving the field tells those."""
    is_text = isinstance(component, gr.Textbox)
    return [component.input, component.blur] if is_text else [component.input]


def refusal(name: str, value: object, trees: Sequence[str]) -> str:
    """Why a setting cannot have this value; empty where it can."""
    try:
        checked({name: value}, trees)
    except MedusaChatError as error:
        return str(error)
    return ""
