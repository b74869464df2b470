"""The command line: parse, call, print. Results go to stdout, progress and errors to stderr.

Exit codes: 0 ok, 1 unexpected, 2 usage, 3 no usable device, 4 model, 5 out of memory, 6 port in
use, 130 interrupted. torch, transformers and gradio are imported only where a command needs them.
"""

import errno
import os
import signal
import sys
import threading
from collections.abc import Sequence
from functools import cache
from typing import Annotated, Any

from typer import Argument, Exit, Option, Typer
from typer.exceptions import Abort, TyperException
from typer.main import get_command

from medusa_chat import __version__
from medusa_chat.checkpoints import inspection
from medusa_chat.clean_stream import clean_output
from medusa_chat.cli.bench import Bench
from medusa_chat.cli.calibrate import Calibrate
from medusa_chat.cli.chat import Chat
from medusa_chat.cli.doctor import doctor
from medusa_chat.cli.export import Export
from medusa_chat.cli.generate import Generate
from medusa_chat.cli.models import models
from medusa_chat.cli.options import (
    PLACE,
    AsJson,
    Backbone,
    Command,
    DataDir,
    Offline,
    count,
    named,
    prepare_process,
)
from medusa_chat.cli.progress_line import note
from medusa_chat.cli.terminal import json_line
from medusa_chat.cli.train import Train
from medusa_chat.cli.ui import Ui
from medusa_chat.errors import MedusaChatError, ModelError
from medusa_chat.messages import LoadRequest

UNWRITTEN = (errno.EPIPE, errno.ENOSPC, errno.EDQUOT)
GROUP_FLAGS = ("--help", "--version")
# Each would silently switch off a protection against malicious files or websites.
WEAKENING_VARIABLES = (
    "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD",
    "GRADIO_SHARE",
    "GRADIO_ALLOWED_PATHS",
    "GRADIO_SERVER_NAME",
    "GRADIO_LOCAL_DEV_MODE",
)

app = Typer(
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Chat with a language model on your own machine, and see how Medusa speeds it up. "
    "Without a command, opens the chat page.",
)

app.add_typer(models)
for command in (Train, Calibrate, Export, Bench, Ui, Generate, Chat):
    app.command()(command)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. An error is one line on stderr."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or (arguments[0].startswith("-") and arguments[0] not in GROUP_FLAGS):
        arguments.insert(0, "ui")
    _set_streams()
    clean_output()
    try:
        _end_in_order()
        command = _parser()(arguments, prog_name="medusa-chat", standalone_mode=False)
        code = (command.run() if isinstance(command, Command) else command) or 0
        sys.stdout.flush()
        return code
    except TyperException as error:
        note(" ".join(error.format_message().split()))
        return error.exit_code
    except MedusaChatError as error:
        note(" ".join(str(error).split()))
        return error.exit_code
    except MemoryError:
        note("out of memory: choose a smaller model, precision or --max-context")
        return 5
    except (KeyboardInterrupt, Abort):
        return 130
    except OSError as error:  # the reader of our output closed it, as `head` does, or it is full
        code = error.errno
        if sys.platform == "win32" and code == errno.EINVAL and not sys.stdout.isatty():
            code = errno.EPIPE  # what Windows calls a pipe without a reader
        if code not in UNWRITTEN:
            raise
        if code != errno.EPIPE:
            note(f"cannot write the output: {error.strerror}")
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _set_streams() -> None:
    """Make a stream of what was closed, and of what no terminal reads or writes UTF-8: Windows has
    an alphabet of 256 characters there."""
    for name in ("stdin", "stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None and name != "stdin":  # it was closed
            setattr(sys, name, stream := open(os.devnull, "w", encoding="utf-8"))
        if not hasattr(stream, "reconfigure"):
            continue
        if sys.platform == "win32" and not stream.isatty():
            stream.reconfigure(encoding="utf-8", errors="replace")
        elif name != "stdin":
            stream.reconfigure(errors="replace")  # a terminal that cannot show a character


@cache
def _parser() -> Any:
    """All commands with their options; `app` itself would make them anew for each command line."""
    return get_command(app)


def _end_in_order() -> None:
    """Let a closed terminal and a plain kill end the command as Ctrl-C does: what is half written
    is cleared away and the model's process ends. What is to be ignored, as by nohup, still is."""

    def end(number: int, frame: object) -> None:
        signal.signal(number, signal.SIG_DFL)
        raise SystemExit(128 + number)

    if threading.current_thread() is threading.main_thread():
        for name in ("SIGHUP", "SIGTERM"):
            number = getattr(signal, name, None)
            if number is not None and signal.getsignal(number) == signal.SIG_DFL:
                signal.signal(number, end)


def _print_version(asked: bool) -> None:
    if asked:
        print(f"medusa-chat {__version__}")
        raise Exit


@app.callback()
def start(
    version: Annotated[
        bool,
        Option(
            "--version", is_eager=True, callback=_print_version, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Runs before every command: remove variables that weaken protections."""
    for name in WEAKENING_VARIABLES:
        if os.environ.pop(name, None) is not None:
            note(f"the environment variable {name} is ignored: it would weaken a protection")


@app.command()
def inspect(
    checkpoint: Annotated[
        str | None, Argument(metavar=PLACE, help="Checkpoint to inspect. Default: the demo.")
    ] = None,
    backbone: Backbone = None,
    max_context: Annotated[
        int | None, count("Context length of the memory estimate.", min=16)
    ] = None,
    offline: Offline = False,
    as_json: AsJson = False,
    data_dir: DataDir = None,
) -> None:
    """Report a checkpoint's contents, memory needs and problems, without loading it."""
    prepare_process(data_dir=data_dir, offline=offline)
    checkpoint, backbone = named(checkpoint, backbone)
    report = inspection.inspect(
        checkpoint,
        backbone,
        max_context,
        inspection.open_anywhere,
        dry_load=_dry_load,
    )
    print(json_line(report.to_json(), indent=2) if as_json else "\n".join(report.lines()))
    if report.problems:
        raise ModelError(f"{checkpoint} cannot be loaded as it is: {report.problems[0]}")


def _dry_load(request: LoadRequest) -> None:
    from medusa_chat.checkpoints.load import dry_load  # torch takes seconds to import

    dry_load(request)


app.command()(doctor)
