"""The command line: parse, call, print. Results go to stdout, progress and errors to stderr.

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

from medusa_chat import __version__, paths
from medusa_chat.cli.bench import bench
from medusa_chat.cli.models import models
from medusa_chat.cli.options import (
    AcceptanceName,
    AsJson,
    Backbone,
    Checkpoint,
    DataDir,
    Device,
    DrafterName,
    MaxContext,
    MaxNewTokens,
    Nodes,
    Offline,
    PosteriorAlpha,
    PosteriorThreshold,
    Precision,
    Seed,
    Stop,
    Temperature,
    TopK,
    TopP,
    TreeName,
    load_request,
    prepare_process,
    refuse_unknown_tree,
)
from medusa_chat.cli.prompts import as_asked, read_prompts
from medusa_chat.cli.terminal import answer, load, note, opened
from medusa_chat.cli.train import calibrate, train
from medusa_chat.decoding.settings import GenerationSettings
from medusa_chat.errors import DeviceError, MedusaChatError, ModelError, UsageError
from medusa_chat.runtime.in_process import InProcess
from medusa_chat.runtime.session import Session
from medusa_chat.runtime.worker_process import WorkerProcess
from medusa_chat.trees.presets import tree_names

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
    help="Chat with a language model on your own machine, and see why Medusa makes it fast. "
    "Without a command the page opens.",
)

app.add_typer(models)
app.command()(train)
app.command()(calibrate)
app.command()(bench)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. An error is one line on stderr."""
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
    except BrokenPipeError:  # the reader of our output closed it, as `head` does
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
    """Runs before every command: remove variables that weaken protections."""
    for name in WEAKENING_VARIABLES:
        if os.environ.pop(name, None) is not None:
            note(f"the environment variable {name} is ignored: it would weaken a protection")


# Options of one command alone.

Host = Annotated[str, Option(help="Another address needs a password.")]
Port = Annotated[
    int | None, Option(min=1, max=65535, help="Default: the first free of 7860 to 7959.")
]
Share = Annotated[bool, Option("--share", help="A public link with a password, for 24 hours.")]
Auth = Annotated[str | None, Option(metavar="USER:PASSWORD", help="Ask for it.")]
NoBrowser = Annotated[bool, Option("--no-browser", help="Open no browser.")]
RootPath = Annotated[
    str, Option(metavar="PATH", help="Path or address of the page behind a proxy.")
]
PromptText = Annotated[str | None, Option(metavar="TEXT", help="The prompt.")]
PromptFile = Annotated[Path | None, Option(metavar="FILE", help="A UTF-8 file that holds it.")]
MessagesFile = Annotated[
    Path | None, Option(metavar="FILE", help='JSON: [{"role": ..., "content": ...}].')
]
PromptsFile = Annotated[
    Path | None, Option(metavar="FILE", help='JSONL: {"prompt"} or {"messages"} a line.')
]
Raw = Annotated[bool, Option("--raw", help="The prompt as it is, no chat template.")]
EventsAsJson = Annotated[bool, Option("--json", help="Print one event a line.")]
Trace = Annotated[Path | None, Option(metavar="FILE", help="Write the events here too.")]


# The commands.


@app.command()
def ui(
    host: Host = "127.0.0.1",
    port: Port = None,
    share: Share = False,
    auth: Auth = None,
    no_browser: NoBrowser = False,
    root_path: RootPath = "",
    checkpoint: Checkpoint = "demo",
    backbone: Backbone = None,
    precision: Precision = "auto",
    device: Device = "auto",
    max_context: MaxContext = None,
    offline: Offline = False,
    data_dir: DataDir = None,
) -> int:
    """Open the page. This is what runs without a command."""
    request = load_request(checkpoint, backbone, precision, device, max_context, offline, data_dir)
    login = parse_auth(auth)
    with closing(Session(WorkerProcess(), tunes=True)) as session:
        session.submit(request)  # the worker loads while gradio is imported
        from medusa_chat.runtime.history import FILE, History
        from medusa_chat.ui.app import PageOptions, launch

        options = PageOptions(
            trees=tree_names(),
            host=host,
            port=port,
            share=share,
            auth=login,
            open_browser=not no_browser,
            root_path=root_path,
            history=History(paths.data_dir() / FILE),
        )
        return launch(session, options)


def parse_auth(auth: str | None) -> tuple[str, str] | None:
    """(user, password) of --auth; the password may hold colons. Raises UsageError."""
    if auth is None:
        return None
    user, _, password = auth.partition(":")
    if not (user and password):
        raise UsageError("auth is not USER:PASSWORD: both are needed, with a colon between")
    return user, password


@app.command()
def generate(
    prompt: PromptText = None,
    prompt_file: PromptFile = None,
    messages: MessagesFile = None,
    prompts: PromptsFile = None,
    raw: Raw = False,
    as_json: EventsAsJson = False,
    trace: Trace = None,
    checkpoint: Checkpoint = "demo",
    backbone: Backbone = None,
    precision: Precision = "auto",
    device: Device = "auto",
    max_context: MaxContext = None,
    offline: Offline = False,
    data_dir: DataDir = None,
    drafter: DrafterName = None,
    acceptance: AcceptanceName = "exact",
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    posterior_threshold: PosteriorThreshold = 0.09,
    posterior_alpha: PosteriorAlpha = 0.3,
    tree: TreeName = "auto",
    nodes: Nodes = None,
    max_new_tokens: MaxNewTokens = 512,
    seed: Seed = None,
    stop: Stop = None,
) -> None:
    """Answer prompts, one after another."""
    request = load_request(checkpoint, backbone, precision, device, max_context, offline, data_dir)
    settings = GenerationSettings(
        *(drafter, acceptance, temperature, top_p, top_k, posterior_threshold, posterior_alpha),
        *(tree, nodes, max_new_tokens, seed, tuple(stop or ())),
    )
    refuse_unknown_tree(tree, nodes)
    asked = [as_asked(p, raw) for p in read_prompts(prompt, prompt_file, messages, prompts)]
    with opened(trace) as file, closing(InProcess()) as runner:
        load(runner, replace(request, tree=tree, nodes=nodes))
        for one in asked:
            answer(runner, one, settings, as_json, file)


@app.command()
def inspect(
    checkpoint: Annotated[str, Argument(metavar="ID|DIR", help="What to look at.")] = "demo",
    backbone: Backbone = None,
    max_context: Annotated[
        int | None, Option(metavar="N", min=16, help="Estimate memory for this context.")
    ] = None,
    as_json: AsJson = False,
    data_dir: DataDir = None,
) -> None:
    """Say what a checkpoint is, what it needs and what is wrong with it, without loading it."""
    prepare_process(data_dir=data_dir)
    from medusa_chat.checkpoints import inspection

    report = inspection.inspect(checkpoint, backbone, max_context, inspection.open_anywhere)
    print(json.dumps(report.to_json(), indent=2) if as_json else "\n".join(report.lines()))
    if report.problems:
        raise ModelError(f"{checkpoint} cannot be loaded as it is: {report.problems[0]}")


@app.command()
def doctor(device: Device = "auto", data_dir: DataDir = None, as_json: AsJson = False) -> None:
    """Say what this machine offers and what stands in the way."""
    prepare_process(device, data_dir)
    from medusa_chat.cli.doctor import examine, has_cuda

    report = examine()
    print(json.dumps(report.to_json(), indent=2) if as_json else "\n".join(report.lines()))
    if device.startswith("cuda") and not has_cuda(report):
        raise DeviceError("torch sees no CUDA device: check the NVIDIA driver, or use --device cpu")
