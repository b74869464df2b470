"""The command line: all commands, `inspect`, and the exit code of each kind of error.

Exit codes: 0 ok, 1 unexpected, 2 usage, 3 no usable device, 4 model, 5 out of memory, 6 port in
use, 130 interrupted. Results go to stdout, progress and errors to stderr. torch, transformers and
gradio are imported only by the commands that need them.
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
from medusa_chat.checkpoints.machine import this_cpu
from medusa_chat.clean_stream import clean_output
from medusa_chat.cli.bench import Bench
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
from medusa_chat.cli.serve import Serve
from medusa_chat.cli.terminal import json_line, note
from medusa_chat.cli.training import Calibrate, Train
from medusa_chat.cli.ui import Ui
from medusa_chat.errors import MedusaChatError, ModelError
from medusa_chat.messages import LoadRequest

OUTPUT_ERRORS = (errno.EPIPE, errno.ENOSPC, errno.EDQUOT)
GROUP_FLAGS = ("--help", "--version")
# Each of them silently disables a protection against malicious files or websites.
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
for command in (Train, Calibrate, Export, Bench, Ui, Generate, Chat, Serve):
    app.command()(command)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. An error is one line on stderr."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or (arguments[0].startswith("-") and arguments[0] not in GROUP_FLAGS):
        arguments.insert(0, "ui")
    _set_streams()
    clean_output()
    try:
        _handle_signals()
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
    except OSError as error:  # our output was closed, for instance by `head`, or its disk is full
        code = error.errno
        if sys.platform == "win32" and code == errno.EINVAL and not sys.stdout.isatty():
            code = errno.EPIPE  # Windows reports a closed pipe as EINVAL
        if code not in OUTPUT_ERRORS:
            raise
        if code != errno.EPIPE:
            note(f"cannot write the output: {error.strerror}")
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _set_streams() -> None:
    """Replace closed streams; use UTF-8 for pipes on Windows, whose default is a code page."""
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
    """The parser of all commands; calling `app` would build it again for every command line."""
    return get_command(app)


def _handle_signals() -> None:
    """Clean up on SIGHUP and SIGTERM as on Ctrl-C: delete partial files, end the worker process.
    A signal that is ignored, for instance by nohup, stays ignored."""

    def end(number: int, frame: object) -> None:
        signal.signal(number, signal.SIG_DFL)
        raise SystemExit(128 + number)

    if threading.current_thread() is threading.main_thread():
        for name in ("SIGHUP", "SIGTERM"):
            number = getattr(signal, name, None)
            if number is not None and signal.getsignal(number) == signal.SIG_DFL:
                signal.signal(number, end)


def _print_version(requested: bool) -> None:
    if requested:
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
    """Runs before every command: remove environment variables that disable a protection."""
    for name in WEAKENING_VARIABLES:
        if os.environ.pop(name, None) is not None:
            note(f"ignoring the environment variable {name}: it would disable a protection")


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
    from medusa_chat.checkpoints.devices import choose_device  # imports torch
    from medusa_chat.checkpoints.kernel_trial import machine_memory

    machine = machine_memory(choose_device("auto"), with_swap=True)
    report = inspection.inspect(
        checkpoint,
        backbone,
        max_context,
        inspection.open_anywhere,
        machine.device,
        this_cpu(),
        _dry_load,
        machine,
    )
    print(json_line(report.to_json(), indent=2) if as_json else "\n".join(report.lines()))
    if report.problems:
        raise ModelError(f"{checkpoint} cannot be loaded: {report.problems[0]}")


def _dry_load(request: LoadRequest) -> None:
    from medusa_chat.checkpoints.load import dry_load  # torch takes seconds to import

    dry_load(request)


app.command()(doctor)
