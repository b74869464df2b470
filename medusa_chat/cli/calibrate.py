"""`medusa-chat calibrate`: measure the heads on prompts, and search the best tree for them."""

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from medusa_chat import paths
from medusa_chat.checkpoints.places import shipped_folder
from medusa_chat.cli.options import (
    AsJson,
    LoadOptions,
    More,
    count,
    data_paths,
    file_path,
    flag,
    value,
)
from medusa_chat.cli.terminal import require_folder, stopping
from medusa_chat.cli.training_progress import TrainingView
from medusa_chat.errors import UsageError
from medusa_chat.runtime.history import FILE, History
from medusa_chat.training.conversations import Conversation
from medusa_chat.trees.calibration import CALIBRATION_FILE


@dataclass(frozen=True)
class CalibrateOptions:
    """What is measured on, and where the tree goes."""

    data: Annotated[
        list[str] | None,
        value("FILE|HUB_DATASET...", "Prompts, as for train; not needed with --chats."),
    ] = None
    more: More = None
    chats: Annotated[bool, flag("--chats", "Measure on your saved chats: a personal tree.")] = False
    nodes: Annotated[int, count("Nodes of the tree, root included.", min=2, max=256)] = 64
    output: Annotated[Path | None, file_path("Default: the checkpoint's folder.")] = None
    as_json: AsJson = False


@dataclass(frozen=True)
class Calibrate(LoadOptions, CalibrateOptions):
    """Measure each head's accuracy on prompts, and search the best tree for it."""

    def run(self) -> int | None:
        """Check the options, then measure; 130 where it was stopped."""
        request = self.load_request()
        if not self.data and not self.chats:
            raise UsageError("there is nothing to measure on: give --data FILE, or --chats")
        files = data_paths(self.data, self.more)
        file = calibration_file(request.checkpoint, self.output, files)
        chats = own_chats() if self.chats else []
        from medusa_chat.training.calibration import calibrate

        view = TrainingView(self.as_json)
        events = calibrate(request, files, self.nodes, file, chats)
        with stopping() as is_stopped, closing(events):
            for event in events:
                view.show(event)
                if is_stopped():
                    view.say("stopped: nothing was written")
                    return 130
        return None


def calibration_file(checkpoint: str, output: Path | None, read: Sequence[Path] = ()) -> Path:
    """The file of a calibration. read: what it is measured on. Raises UsageError before anything
    is loaded."""
    if output is None:
        folder = Path(checkpoint).expanduser()
        if shipped_folder(checkpoint) is not None or not folder.is_dir():
            raise UsageError(f"{checkpoint} is not a local folder: give --output FILE")
        output = folder / CALIBRATION_FILE
    require_folder(output, *read)
    return output


def own_chats() -> list[Conversation]:
    """The chats saved by the page. Raises UsageError where there are none."""
    chats: list[Conversation] = []
    for number, stored in enumerate(History(paths.data_dir() / FILE).all(), start=1):
        system = ({"role": "system", "content": stored.system},) if stored.system.strip() else ()
        chat = Conversation((*system, *stored.messages), f"chat {number}")
        if chat.asked:
            chats.append(chat)
    if not chats:
        raise UsageError("no chats are saved yet: chat with a model in the page, or give --data")
    return chats
