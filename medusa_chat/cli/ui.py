"""`medusa-chat ui`: opens the page; the default command."""

import threading
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from typer import Option

from medusa_chat import paths
from medusa_chat.cli.options import ApiAccess, DraftOptions, flag, value
from medusa_chat.cli.terminal import note
from medusa_chat.errors import UsageError
from medusa_chat.messages import LoadRequest
from medusa_chat.runtime.history import FILE, History
from medusa_chat.runtime.recent_models import RecentModel, RecentModels
from medusa_chat.runtime.requests import Switch, Ticket
from medusa_chat.runtime.runner import WorkerGone, WorkerProcess
from medusa_chat.runtime.session import Session
from medusa_chat.trees.presets import tree_names

ENDED = (
    ", the last model, is not loaded: medusa-chat was ended while it was loaded at the last start; "
    "the demo is loaded instead"
)


@dataclass(frozen=True)
class UiOptions:
    """Options of the page."""

    host: Annotated[
        str, Option(help="Address to listen on; others than 127.0.0.1 need a password.")
    ] = "127.0.0.1"
    port: Annotated[
        int | None, Option(min=1, max=65535, help="Default: the first free port from 7860 to 7959.")
    ] = None
    share: Annotated[
        bool, flag("--share", "Create a public link with a password, valid for 24 hours.")
    ] = False
    auth: Annotated[str | None, value("USER:PASSWORD", "Require this login.")] = None
    no_browser: Annotated[bool, flag("--no-browser", "Do not open a browser.")] = False
    root_path: Annotated[str, value("PATH", "Path or URL of the page behind a reverse proxy.")] = ""
    api: Annotated[bool, flag("--api", "Let other programs ask the model, under /v1.")] = False


@dataclass(frozen=True)
class Ui(DraftOptions, ApiAccess, UiOptions):
    """Open the chat page (the default command)."""

    def run(self) -> int:
        """Load the model and serve the page until Ctrl-C. Returns the exit code."""
        request = self.load_request()
        login = parse_auth(self.auth)
        if not self.api and (self.api_key or self.allow_origin):
            raise UsageError("--api-key and --allow-origin need --api")
        _note_old_trees(paths.data_dir() / "trees")
        recent = RecentModels(paths.data_dir(), note)
        with ExitStack() as stack:
            session = stack.enter_context(closing(Session(WorkerProcess(), request)))
            session.lifecycle.on_loaded = recent.note
            stack.callback(recent.end)  # quitting is not a failed load
            load = self._first_load(session, request, recent)
            stack.callback(session.cancel, load)
            options_of, launch = _page()
            from medusa_chat.server.app import ApiOptions

            api = ApiOptions(self.api_key, tuple(self.allow_origin or ())) if self.api else None
            options = options_of(
                trees=tree_names(),
                host=self.host,
                port=self.port,
                share=self.share,
                auth=login,
                open_browser=not self.no_browser,
                root_path=self.root_path,
                history=History(paths.data_dir() / FILE),
                recent=recent,
                api=api,
            )
            code: int = launch(session, options)
            return code

    def _first_load(self, session: Session, request: LoadRequest, recent: RecentModels) -> Any:
        """The ticket of the first load, which the worker begins while gradio is imported: of the
        model that was named, else of the last one, else of the demo."""
        last = None if self.checkpoint or self.backbone or self.draft else recent.last()
        if last is None:
            load: Ticket[Any] = session.submit(request)
        elif recent.begin():
            recent.note_end(last)
            recent.end()
            load = session.submit(Switch(request, why=f"{last.name}{ENDED}"))
            note(f"{last.name}{ENDED}")
            last = None
        else:
            load = session.submit(Switch(last.at_start(request), otherwise=request))
        _follow_first(load, recent, last)
        return load


def _note_old_trees(folder: Path) -> None:
    """Say once that the personal trees of earlier versions are ignored."""
    if folder.is_dir() and any(folder.glob("*.json")):
        note(f"ignoring {folder}: every step now chooses its own tree; you can delete this folder")


def _follow_first(load: Ticket[Any], recent: RecentModels, last: RecentModel | None) -> None:
    """Report a failed first load on stderr too, as the page may not be open, and keep what became
    of the last model."""

    def follow() -> None:
        load.done.wait()
        if load.error and not load.is_cancelled:
            name = f"{last.name}: " if last else ""
            told = "the demo is loaded instead" if last else "choose another model in the page"
            note(f"{name}{load.error}; {told}")
        if last is not None:
            if isinstance(load.cause, WorkerGone) and not load.is_cancelled:
                recent.note_end(last)
            recent.end()

    threading.Thread(target=follow, daemon=True).start()


def _page() -> tuple[Any, Any]:
    """(PageOptions, launch) of medusa_chat.ui.app, which imports Gradio."""
    from medusa_chat.ui import no_stubs

    try:
        with no_stubs():
            from medusa_chat.ui.app import PageOptions, launch
    except OSError:  # this version of Gradio needs a file that no_stubs omits
        from medusa_chat.ui.app import PageOptions, launch
    return PageOptions, launch


def parse_auth(auth: str | None) -> tuple[str, str] | None:
    """(user, password) of --auth; the password may contain colons. Raises UsageError."""
    if auth is None:
        return None
    user, _, password = auth.partition(":")
    if not (user and password):
        raise UsageError("--auth must have the form USER:PASSWORD")
    return user, password
