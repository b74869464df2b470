"""`medusa-chat serve`: the model for other programs, by the API of OpenAI."""

import threading
from contextlib import closing
from dataclasses import dataclass
from typing import Annotated

from typer import Option

from medusa_chat.cli.options import ApiAccess, DraftOptions
from medusa_chat.cli.terminal import note
from medusa_chat.messages import LoadPhase
from medusa_chat.runtime.requests import Ticket
from medusa_chat.runtime.runner import WorkerProcess
from medusa_chat.runtime.session import Session


@dataclass(frozen=True)
class AddressOptions:
    """Where the server listens."""

    host: Annotated[str, Option(help="Address to listen on; any other needs --api-key.")] = (
        "127.0.0.1"
    )
    port: Annotated[
        int | None, Option(min=1, max=65535, help="Default: the first free port from 8000 to 8099.")
    ] = None


@dataclass(frozen=True)
class Serve(DraftOptions, ApiAccess, AddressOptions):
    """Serve the model to other programs, by the API of OpenAI."""

    def run(self) -> int:
        """Load the model and serve it until Ctrl-C. Returns the exit code."""
        request = self.load_request()
        with closing(Session(WorkerProcess())) as session:
            load = session.submit(request)
            from medusa_chat.server.app import ApiOptions  # while the model is loaded
            from medusa_chat.server.serve import ServeOptions, serve

            _tell_load(load)
            api = ApiOptions(self.api_key, tuple(self.allow_origin or ()))
            options = ServeOptions(self.host, self.port, api)
            return serve(session, options, lambda line: print(line, flush=True))


def _tell_load(load: Ticket[LoadPhase]) -> None:
    """Say on stderr, from a thread of its own, how the load ended."""

    def tell() -> None:
        load.done.wait()
        phase = load.result
        if load.error and not load.is_cancelled:
            note(f"{load.error}; end the server with Ctrl-C, and start it with another model")
        elif phase is not None and phase.model is not None:
            model = phase.model
            note(f"{model.name} is loaded: {model.precision} on {model.device}")

    threading.Thread(target=tell, daemon=True).start()
