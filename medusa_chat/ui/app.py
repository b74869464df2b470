"""The page as a server: built, opened on a port, closed with Ctrl-C."""

import contextlib
import io
import os
import secrets
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import gradio as gr
from starlette.middleware import Middleware

from medusa_chat.errors import PortInUseError, UsageError
from medusa_chat.paths import asset
from medusa_chat.runtime.history import History
from medusa_chat.runtime.personal_tree import PersonalTrees
from medusa_chat.runtime.session import Session
from medusa_chat.ui.access.guard import GUEST, Guard
from medusa_chat.ui.access.password import PasswordGate
from medusa_chat.ui.access.share import Share
from medusa_chat.ui.access.tunnel import Entrance, ShareError
from medusa_chat.ui.chat.controller import ChatController
from medusa_chat.ui.chat.tab import build_chat
from medusa_chat.ui.compare.tab import build_compare
from medusa_chat.ui.header import build_header
from medusa_chat.ui.models.tab import build_models
from medusa_chat.ui.page.live import Live
from medusa_chat.ui.shell import Shell
from medusa_chat.ui.theme import theme
from medusa_chat.ui.tune.tab import build_tune

STYLES = ("page.css", "share.css", "chat.css", "tree.css", "compare.css", "models.css", "tune.css")
FIRST_PORT, LAST_PORT = 7860, 7959
ATTEMPTS = 5
EVERYWHERE = ("0.0.0.0", "::")
USER = "medusa"
INTERRUPTED = 130
Auth = tuple[str, str]


@dataclass(frozen=True)
class PageOptions:
    """How the page is opened. trees: names of tree presets offered beside "auto". port: None is
    the first free one. root_path: a path or a whole address, where a proxy in front has it.
    history: where conversations are kept, None for nowhere."""

    trees: Sequence[str] = ()
    host: str = "127.0.0.1"
    port: int | None = None
    share: bool = False
    auth: Auth | None = None
    open_browser: bool = False
    root_path: str = ""
    history: History | None = None


@dataclass(frozen=True)
class Page:
    """An open page. auth: what opens it from elsewhere than its own machine, None if nothing."""

    blocks: gr.Blocks
    url: str
    auth: Auth | None
    share: Share
    entrance: Entrance

    def close(self) -> None:
        """End the link and the server; the session stays with its owner."""
        self.share.stop()
        self.entrance.close()
        with contextlib.redirect_stdout(io.StringIO()):
            self.blocks.close(verbose=False)


def build_app(
    session: Session, trees: Sequence[str], share: Share, history: History | None = None
) -> tuple[gr.Blocks, ChatController]:
    """The page over a session, and its desk. trees: presets' names, offered beside "auto"."""
    with gr.Blocks(title="medusa-chat", analytics_enabled=False, fill_width=True) as blocks:
        build_header(session, share)
        with gr.Tabs(elem_id="tabs"):
            with gr.Tab("Chat", id="chat", elem_id="chat"):
                chat = build_chat(session, trees, history)
            with gr.Tab("Compare", id="compare", elem_id="compare-tab"):
                desk = chat.desk
                build_compare(session, trees, desk.measured_plain, (chat.tab, desk.last_message))
            with gr.Tab("Models", id="models", elem_id="models-tab"):
                build_models(session)
            with gr.Tab("Tune", id="tune", elem_id="tune-tab"):
                folder = history.file.parent / "trees" if history else None
                personal = PersonalTrees(session, folder)
                build_tune(session, personal)
                chat.desk.rooms.learn = lambda answer: personal.count_in_background(
                    answer.prefilled, answer.steps
                )
    return blocks, chat.desk


def launch(session: Session, options: PageOptions, tell: Callable[[str], None] = print) -> int:
    """Open the page and serve it until Ctrl-C; returns the exit code.

    tell gets each line the user must see: the address, a generated password, a share that failed.
    Raises PortInUseError for an explicit port that is taken, UsageError for what cannot be opened.
    """
    page = open_page(session, options)
    for line in greeting(page, was_generated=options.auth is None):
        tell(line)
    try:
        if options.share:
            page.share.begin().join()
            for line in share_lines(page.share):
                tell(line)
        while page.blocks.server.thread.is_alive():
            page.blocks.server.thread.join(1)  # without a limit Windows would not see Ctrl-C
    except KeyboardInterrupt:
        return INTERRUPTED
    finally:
        page.close()
    return 0


def open_page(session: Session, options: PageOptions = PageOptions()) -> Page:
    """Open the page and return; what others can reach never opens without a password."""
    host, root_path = options.host.strip("[]"), options.root_path or ""
    proxy = urlsplit(root_path).netloc
    auth = options.auth
    if auth is None and not _is_local(host):
        auth = (USER, secrets.token_urlsafe(16))
    if auth is not None and not all(auth):
        raise UsageError("--auth needs a user and a password: USER:PASSWORD")
    entrance = Entrance()
    share = Share(_not_behind_an_address if proxy else entrance.open)
    blocks, desk = build_app(session, options.trees, share, options.history)
    guard = Middleware(
        Guard,
        hosts=[host, *_own_names(host)],
        allow_addresses=host in EVERYWHERE,
        origins=[proxy] if proxy else [],
    )

    shell = Middleware(Shell, prefix=urlsplit(root_path).path)
    live = Middleware(Live, updates_of=desk.updates_of)

    @contextlib.asynccontextmanager
    async def lifespan(app: Any) -> AsyncIterator[None]:
        token = secrets.token_urlsafe(32)
        app.tokens[token] = GUEST
        ticket = f"access-token-{app.cookie_id}={token}" if auth else ""
        entrance.attach(PasswordGate(app, share, root_path=urlsplit(root_path).path, ticket=ticket))
        yield

    for attempts_left in reversed(range(ATTEMPTS)):
        quiet = io.StringIO()  # Gradio prints to stdout, which is for results
        try:
            with contextlib.redirect_stdout(quiet), _port_errors(options.port):
                _, url, _ = blocks.launch(
                    server_name=f"[{host}]" if ":" in host else host,
                    server_port=_port(host, options.port),
                    share=False,
                    auth=auth,
                    inbrowser=options.open_browser,
                    root_path=root_path,
                    app_kwargs={"middleware": [guard, shell, live], "lifespan": lifespan},
                    **_looks(),
                    **_refusals(),
                )
            break
        except PortInUseError:  # somebody took it in between: there are others
            if options.port is not None or not attempts_left:
                raise
    return Page(blocks, url, auth, share, entrance)


def greeting(page: Page, *, was_generated: bool) -> list[str]:
    """The lines a user must see once the page is open."""
    lines = [f"medusa-chat is open at {page.url} (Ctrl-C ends it)"]
    if page.auth and was_generated:
        lines.append(f"user {page.auth[0]}, password {page.auth[1]}")
    return lines


def share_lines(share: Share) -> list[str]:
    """The lines a user must see once a link was asked for."""
    link = share.state.link
    if link is None:
        return [f"not shared: {share.state.message}"]
    until = time.strftime("%A %H:%M", time.localtime(link.expires))
    return [f"shared at {link.url} until {until}, password {link.password}"]


def _not_behind_an_address() -> int:
    raise ShareError("Sharing needs a --root-path that is a path, like /chat, not an address.")


def _looks() -> dict[str, Any]:
    styles = [asset("css", name).read_text(encoding="utf-8") for name in STYLES]
    icon = str(asset("icons", "medusa.svg"))
    return {"theme": theme(), "css": "\n".join(styles), "footer_links": [], "favicon_path": icon}


def _refusals() -> dict[str, Any]:
    """What Gradio would do by itself and must not."""
    return {
        "prevent_thread_lock": True,
        "quiet": True,
        "inline": False,
        "ssr_mode": False,
        "pwa": False,
        "mcp_server": False,
        "run_history": False,
        "enable_monitoring": False,
        "show_error": False,
        "max_file_size": "1mb",
        "num_workers": 0,
    }


def _port(host: str, port: int | None) -> int:
    """The port to use: the one asked for, or the first free one of the usual range."""
    if port is not None:
        if not _is_free(host, port):
            raise PortInUseError(f"port {port} is in use: choose another with --port, or leave it")
        return port
    for candidate in range(FIRST_PORT, LAST_PORT + 1):
        if _is_free(host, candidate):
            return candidate
    raise PortInUseError(f"ports {FIRST_PORT} to {LAST_PORT} are in use: choose one with --port")


@contextlib.contextmanager
def _port_errors(port: int | None) -> Iterator[None]:
    """What Gradio says when somebody else took the port in between."""
    try:
        yield
    except OSError as error:
        if "port" not in str(error):
            raise
        raise PortInUseError(f"port {port or 'chosen'} was taken: try again") from error


def _is_free(host: str, port: int) -> bool:
    """Whether a server could bind here, and nobody listens on the local address either."""
    for name in {host, "127.0.0.1"}:
        family = socket.AF_INET6 if ":" in name else socket.AF_INET
        with socket.socket(family) as probe:
            if os.name == "posix":  # elsewhere it would let two servers share a port
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((name, port))
            except socket.gaierror:
                raise UsageError(f"host {name!r} is not known: give an address") from None
            except OverflowError:
                raise UsageError(f"port is {port}: give 1 to 65535") from None
            except OSError:
                return False
    return True


def _is_local(host: str) -> bool:
    return host in ("localhost", "::1") or host.startswith("127.")


def _own_names(host: str) -> list[str]:
    if _is_local(host):
        return []
    name = socket.gethostname()
    return [name, f"{name}.local"]
