"""The page as a server: opened on a port, told of, closed with Ctrl-C."""

import contextlib
import io
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlsplit

import gradio as gr
from starlette.middleware import Middleware

from medusa_chat.errors import PortInUseError, UsageError
from medusa_chat.hosts import EVERYWHERE, Hosts, addresses, check_host, is_local, own_names
from medusa_chat.runtime.history import History
from medusa_chat.runtime.recent_models import RecentModels
from medusa_chat.runtime.session import Session
from medusa_chat.server.app import Api, ApiOptions, require_key
from medusa_chat.ui.access import faults
from medusa_chat.ui.access.guard import GUEST, Guard, bound
from medusa_chat.ui.access.login_limit import LoginLimit
from medusa_chat.ui.access.once import Once
from medusa_chat.ui.access.own_states import OwnStates
from medusa_chat.ui.access.password import PasswordGate
from medusa_chat.ui.access.share import Share
from medusa_chat.ui.access.tunnel import GuestServer, ShareError
from medusa_chat.ui.page.live import Live
from medusa_chat.ui.page.shell import Shell
from medusa_chat.ui.tabs import build_app
from medusa_chat.ui.theme import looks

Auth = tuple[str, str]
USER = "medusa"
TRIES = "After five wrong passwords even the right one is refused for a minute."
INTERRUPTED = 130
QUEUE_SECONDS = 0.02  # between two looks into Gradio's queue


@dataclass(frozen=True)
class PageOptions:
    """How the page is opened. trees: names of tree presets offered beside "auto". port: None is
    the first free one. root_path: a path or a whole address, where a proxy in front has it.
    history: where conversations are kept, None for nowhere. recent: the same of the list of
    models. api: offered
    under /v1, None for not."""

    trees: Sequence[str] = ()
    host: str = "127.0.0.1"
    port: int | None = None
    share: bool = False
    auth: Auth | None = None
    open_browser: bool = False
    root_path: str = ""
    history: History | None = None
    recent: RecentModels | None = None
    api: ApiOptions | None = None


@dataclass(frozen=True)
class Page:
    """An open page. auth: what opens it from elsewhere than its own machine, None if nothing.
    others: its addresses for other machines, where it listens on all."""

    blocks: gr.Blocks
    url: str
    auth: Auth | None
    share: Share
    guests: GuestServer
    others: Sequence[str] = ()
    has_api: bool = False
    history: History | None = None

    def close(self) -> None:
        """End the link and the server, and leave the conversations to the next program; the session
        stays with its owner."""
        self.share.stop()
        self.guests.close()
        with contextlib.redirect_stdout(io.StringIO()):
            self.blocks.close(verbose=False)
        if self.history:
            self.history.close()


def say(line: str) -> None:
    """Print a line at once, also into a pipe or a log."""
    print(line, flush=True)


def launch(session: Session, options: PageOptions, tell: Callable[[str], None] = say) -> int:
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
    host, behind = options.host.strip("[]"), options.root_path
    behind = behind if not behind or "://" in behind else f"/{behind.lstrip('/')}"
    options, root = replace(options, root_path=behind), urlsplit(behind)
    check_host(host)
    faults.quiet_faults()
    auth = login_for(host, options.auth)
    guests = GuestServer()
    share = Share(_not_behind_an_address if root.netloc else guests.open)
    blocks, controller = build_app(session, options.trees, share, options.history, options.recent)
    # Gradio looks 1,000 times a second into its queue, 5 % of a core; nothing is queued.
    blocks._queue.sleep_when_free = QUEUE_SECONDS
    hosts, origins = [host, *own_names(host)], [root.netloc] if root.netloc else []
    is_open = host in EVERYWHERE
    api = None
    if options.api is not None:
        require_key(host, options.api, has_login=auth is not None)
        names = Hosts([*hosts, root.hostname or ""], allows_addresses=is_open)
        api = Api(session, names, options.api)
    guard = Middleware(
        Guard, hosts=hosts, allow_addresses=is_open, origins=origins, api=api, prefix=root.path
    )
    once = Middleware(Once, program=blocks.app_id, share=share)
    live = Middleware(
        Live,
        updates_of=controller.updates_of,
        save=controller.save_all,
        take=controller.take_file,
        is_tab=lambda key: controller.tab_of(key) is not None,
    )
    states = OwnStates(blocks)
    share.on_end.append(states.end_guests)
    shell = Middleware(Shell, prefix=root.path)
    layers = [guard, Middleware(LoginLimit), once, shell, live]

    @contextlib.asynccontextmanager
    async def lifespan(app: Any) -> AsyncIterator[None]:
        token = secrets.token_urlsafe(32)
        app.tokens[token] = GUEST
        ticket = f"access-token-{app.cookie_id}={token}" if auth else ""
        guests.attach(PasswordGate(app, share, root_path=root.path, ticket=ticket))
        app.state_holder = states
        states.set_blocks(blocks)
        yield

    url = _serve(blocks, options, host, auth, {"middleware": layers, "lifespan": lifespan})
    others = addresses(host, urlsplit(url).port)
    url = options.root_path if root.netloc else url.replace("[::]", "[::1]")
    return Page(blocks, url, auth, share, guests, others, api is not None, options.history)


def _serve(
    blocks: gr.Blocks,
    options: PageOptions,
    host: str,
    auth: Auth | None,
    kwargs: dict[str, Any],
) -> str:
    """Start the server; returns the page's address. kwargs: of Gradio's FastAPI app."""
    quiet = io.StringIO()  # Gradio prints to stdout, which is for results
    with contextlib.redirect_stdout(quiet), port_errors(options.port):
        _, url, _ = blocks.launch(
            server_name=f"[{host}]" if ":" in host else host,
            server_port=options.port,  # None: Gradio takes the first free one of 7860 to 7959
            share=False,
            auth=auth,
            auth_message=TRIES if auth else None,
            inbrowser=options.open_browser and "://" not in options.root_path,
            root_path=options.root_path,
            app_kwargs=kwargs,
            **looks(),
            **_refusals(),
        )
    if not is_local(host):
        bound(blocks.server.config)
    return url


@contextlib.contextmanager
def port_errors(port: int | None) -> Iterator[None]:
    """Say in one line that Gradio found no port: the one asked for, or any of its range.

    Raises PortInUseError, and UsageError for what is no port.
    """
    try:
        yield
    except OverflowError as error:
        raise UsageError(f"port is {port}: give 1 to 65535") from error
    except OSError as error:
        if "port" not in str(error):
            raise
        if port is None:
            raise PortInUseError("ports 7860 to 7959 are in use: choose one with --port") from error
        raise PortInUseError(
            f"port {port} is in use: choose another with --port, or omit it"
        ) from error


def login_for(host: str, asked: Auth | None) -> Auth | None:
    """The user and password to ask for: made up where others can reach the host. Raises
    UsageError."""
    if asked is None and not is_local(host):
        return USER, secrets.token_urlsafe(16)
    if asked is not None and not all(asked):
        raise UsageError("--auth needs a user and a password: USER:PASSWORD")
    return asked


def greeting(page: Page, *, was_generated: bool) -> list[str]:
    """The lines a user must see once the page is open."""
    lines = [f"medusa-chat is open at {page.url} (Ctrl-C ends it)"]
    lines += [f"for other machines: {url}" for url in page.others]
    lines += [f"for other programs: {page.url}v1 (OpenAI's API)"] if page.has_api else []
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
