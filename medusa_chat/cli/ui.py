"""`medusa-chat ui`: the page, which runs without a command too."""

import threading
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from typer import Option

from medusa_chat import paths
from medusa_chat.cli.options import LoadOptions, flag, value
from medusa_chat.cli.progress_line import note
from medusa_chat.errors import UsageError
from medusa_chat.runtime.history import FILE, History
from medusa_chat.runtime.scheduler import Ticket
from medusa_chat.runtime.session import Session
from medusa_chat.runtime.worker_process import WorkerProcess
from medusa_chat.trees.presets import tree_names


@dataclass(frozen=True)
class UiOptions:
    """Options of the page alone."""

    host: Annotated[str, Option(help="Address to listen on; any other asks for a password.")] = (
        "127.0.0.1"
    )
    port: Annotated[
        int | None, Option(min=1, max=65535, help="Default: the first free port from 7860 to 7959.")
    ] = None
    share: Annotated[
        bool, flag("--share", "Create a public link with a password, for 24 hours.")
    ] = False
    auth: Annotated[str | None, value("USER:PASSWORD", "Require this login.")] = None
    no_browser: Annotated[bool, flag("--no-browser", "Do not open a browser.")] = False
    root_path: Annotated[
        str, value("PATH", "Path or address of the page behind a reverse proxy.")
    ] = ""


@dataclass(frozen=True)
class Ui(LoadOptions, UiOptions):
    """Open the chat page (the default command)."""

    def run(self) -> int:
        """Load the model and serve the page until Ctrl-C. Returns the exit code."""
        request = self.load_request()
        login = parse_auth(self.auth)
        _tell_of_old_trees(paths.data_dir() / "trees")
        with ExitStack() as stack:
            session = stack.enter_context(closing(Session(WorkerProcess())))
            load = session.submit(request)  # the worker loads while gradio is imported
            stack.callback(session.cancel, load)  # before the session ends, which is no failure
            _tell_failure(load)
            options_of, launch = _page()
            options = options_of(
                trees=tree_names(),
                host=self.host,
                port=self.port,
                share=self.share,
                auth=login,
                open_browser=not self.no_browser,
                root_path=self.root_path,
                history=History(paths.data_dir() / FILE),
            )
            code: int = launch(session, options)
            return code


def _tell_of_old_trees(folder: Path) -> None:
    """Say that trees which 0.2.0 kept for a user's chats are not read any more."""
    if folder.is_dir() and any(folder.glob("*.json")):
        note(f"{folder} is not read any more: every step chooses its own tree; delete the folder")


def _tell_failure(load: Ticket[Any]) -> None:
    """Say on stderr, too, why the first model could not be loaded: nobody may look at the page."""

    def tell() -> None:
        load.done.wait()
        if load.error and not load.is_cancelled:
            note(f"{load.error}; the page stays open: choose another model there")

    threading.Thread(target=tell, daemon=True).start()


def _page() -> tuple[Any, Any]:
    """The page's options and what opens it, from a module that imports Gradio."""
    from medusa_chat.ui.stubs import no_stubs

    try:
        with no_stubs():
            from medusa_chat.ui.app import PageOptions, launch
    except OSError:  # a Gradio that cannot do without a file
        from medusa_chat.ui.app import PageOptions, launch
    return PageOptions, launch


def parse_auth(auth: str | None) -> tuple[str, str] | None:
    """(user, password) of --auth; the password may hold colons. Raises UsageError."""
    if auth is None:
        return None
    user, _, password = auth.partition(":")
    if not (user and password):
        raise UsageError("--auth must be USER:PASSWORD, with a colon between the two")
    return user, password
