"""The command line: parse, call, print. Results go to stdout, progress and refusals to stderr.

Exit codes: 0 ok, 1 unexpected, 2 usage, 3 no usable device, 4 model, 5 out of memory, 6 port in
use, 130 interrupted. torch, transformers and gradio are imported only where a command needs them.
"""

import json
import os
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Annotated

from typer import Argument, Exit, Option, Typer
from typer.exceptions import Abort, TyperException

from medusa_chat import __version__
from medusa_chat.cli.bench import bench
from medusa_chat.cli.models import models
from medusa_chat.cli.options import (
    AsJson,
    DataDir,
    Device,
    decode_options,
    load_options,
    place,
    takes,
)
from medusa_chat.cli.prompts import as_asked, read_prompts
from medusa_chat.cli.terminal import answer, load, note, opened
from medusa_chat.cli.train import calibrate, train
from medusa_chat.decoding.settings import GenerationSettings
from medusa_chat.errors import DeviceError, MedusaChatError, ModelError, UsageError
from medusa_chat.messages import LoadRequest
from medusa_chat.runtime.in_process import InProcess
from medusa_chat.runtime.session import Session
from medusa_chat.runtime.worker_process import WorkerProcess
from medusa_chat.trees.presets import tree_names

GROUP_FLAGS = ("--help", "--version")
# Each would quietly undo a protection of ours (reliability, threat model).
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
    help="Chat with a language model on your own machine, and see why Medusa makes it fast. "
    "Without a command the page opens.",
)

app.add_typer(models)
app.command()(train)
app.command()(calibrate)
app.command()(bench)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. A refusal is one line on stderr."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or (arguments[0].startswith("-") and arguments[0] not in GROUP_FLAGS):
        arguments.insert(0, "ui")
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal that cannot show a character
    try:
        return app(arguments, prog_name="medusa-chat", standalone_mode=False) or 0
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
    except BrokenPipeError:  # the reader of our output left, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _print_version(asked: bool) -> None:
    if asked:
        print(f"medusa-chat {__version__}")
        raise Exit


@app.callback()
def start(
    version: Annotated[
        bool,
        Option("--version", is_eager=True, callback=_print_version, help="Print it and exit."),
    ] = False,
) -> None:
    """Before any command."""
    for name in WEAKENING_VARIABLES:
        if os.environ.pop(name, None) is not None:
            note(f"the environment variable {name} weakens this program: ignored")


# The commands.


@app.command()
@takes(request=load_options)
def ui(
    request: LoadRequest,
    host: Annotated[str, Option(help="Another address needs a password.")] = "127.0.0.1",
    port: Annotated[
        int | None, Option(min=1, max=65535, help="Default: the first free of 7860 to 7959.")
    ] = None,
    share: Annotated[
        bool, Option("--share", help="A public link with a password, for 24 hours.")
    ] = False,
    auth: Annotated[str | None, Option(metavar="USER:PASSWORD", help="Ask for it.")] = None,
    no_browser: Annotated[bool, Option("--no-browser", help="Open no browser.")] = False,
    root_path: Annotated[
        str, Option(metavar="PATH", help="Path or address of the page behind a proxy.")
    ] = "",
) -> int:
    """Open the page. This is what runs without a command."""
    user, colon, password = (auth or "").partition(":")
    if auth is not None and not (user and password):
        raise UsageError("auth is not USER:PASSWORD: both are needed, with a colon between")
    with closing(Session(WorkerProcess(), tunes=True)) as session:
        session.submit(request)  # the worker loads while gradio is imported
        from medusa_chat import paths
        from medusa_chat.runtime.history import FILE, History
        from medusa_chat.ui.app import PageOptions, launch

        options = PageOptions(
            trees=tree_names(),
            host=host,
            port=port,
            share=share,
            auth=(user, password) if colon else None,
            open_browser=not no_browser,
            root_path=root_path,
            history=History(paths.data_dir() / FILE),
        )
        return launch(session, options)


@app.command()
@takes(request=load_options, settings=decode_options)
def generate(
    request: LoadRequest,
    settings: GenerationSettings,
    prompt: Annotated[str | None, Option(metavar="TEXT", help="The prompt.")] = None,
    prompt_file: Annotated[
        Path | None, Option(metavar="FILE", help="A UTF-8 file that holds it.")
    ] = None,
    messages: Annotated[
        Path | None, Option(metavar="FILE", help='JSON: [{"role": ..., "content": ...}].')
    ] = None,
    prompts: Annotated[
        Path | None, Option(metavar="FILE", help='JSONL: {"prompt"} or {"messages"} a line.')
    ] = None,
    raw: Annotated[bool, Option("--raw", help="The prompt as it is, no chat template.")] = False,
    as_json: Annotated[bool, Option("--json", help="Print one event a line.")] = False,
    trace: Annotated[Path | None, Option(metavar="FILE", help="Write the events here too.")] = None,
) -> None:
    """Answer prompts, one after another."""
    asked = [as_asked(p, raw) for p in read_prompts(prompt, prompt_file, messages, prompts)]
    request = replace(request, tree=settings.tree, nodes=settings.nodes)  # it stays the only one
    with opened(trace) as file, closing(Session(InProcess())) as session:
        load(session, request)
        for one in asked:
            answer(session, one, settings, as_json, file)


@app.command()
def inspect(
    checkpoint: Annotated[str, Argument(metavar="ID|DIR", help="What to look at.")] = "demo",
    backbone: Annotated[
        str | None, Option(metavar="ID|DIR", help="Another backbone than the checkpoint names.")
    ] = None,
    max_context: Annotated[
        int | None, Option(metavar="N", min=16, help="Estimate memory for this context.")
    ] = None,
    as_json: AsJson = False,
    data_dir: DataDir = None,
) -> None:
    """Say what a checkpoint is, what it needs and what is wrong with it, without loading it."""
    place("auto", data_dir)
    from medusa_chat.checkpoints import inspection

    report = inspection.inspect(checkpoint, backbone, max_context, inspection.open_anywhere)
    print(json.dumps(report.to_json(), indent=2) if as_json else "\n".join(report.lines()))
    if report.problems:
        raise ModelError(f"{checkpoint} cannot be loaded as it is: {report.problems[0]}")


@app.command()
def doctor(device: Device = "auto", data_dir: DataDir = None, as_json: AsJson = False) -> None:
    """Say what this machine offers and what stands in the way."""
    place(device, data_dir)
    from medusa_chat.cli.doctor import examine, has_cuda

    report = examine()
    print(json.dumps(report.to_json(), indent=2) if as_json else "\n".join(report.lines()))
    if device.startswith("cuda") and not has_cuda(report):
        raise DeviceError("there is no CUDA device here")
