"""Options that several commands share, written once: functions from options to what they mean."""

import functools
import inspect
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

from typer import Option

from medusa_chat import paths
from medusa_chat.checkpoints.precision import PRECISIONS
from medusa_chat.decoding.settings import GenerationSettings
from medusa_chat.errors import UsageError
from medusa_chat.messages import LoadRequest
from medusa_chat.trees.presets import load_tree

DEVICE = re.compile(r"auto|cpu|cuda(:\d+)?|mps")

Device = Annotated[str, Option(metavar="auto|cpu|cuda[:N]|mps", help="Where to compute.")]
DataDir = Annotated[
    Path | None, Option(metavar="DIR", file_okay=False, help="Keep your files here.")
]
TreeName = Annotated[str, Option(metavar="auto|NAME|FILE", help="The candidate tree.")]
AsJson = Annotated[bool, Option("--json", help="Print JSON.")]


def takes(**providers: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give a command the options of each provider; it receives what the provider makes of them.

    `@takes(request=load_options)`: the command's parameter `request` is replaced, on the command
    line, by the parameters of load_options.
    """
    shared = {name: inspect.signature(function) for name, function in providers.items()}

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(command)
        def run(**values: Any) -> Any:
            for name, signature in shared.items():
                options = {option: values.pop(option) for option in signature.parameters}
                values[name] = providers[name](**options)
            return command(**values)

        own = inspect.signature(command).parameters.values()
        options = [option for option in own if option.name not in shared]
        for signature in shared.values():
            options += signature.parameters.values()
        run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [option.replace(kind=inspect.Parameter.KEYWORD_ONLY) for option in options]
        )
        return run

    return decorate


def load_options(
    checkpoint: Annotated[
        str, Option(metavar="ID|DIR", help="Medusa checkpoint: a Hub id or a folder.")
    ] = "demo",
    backbone: Annotated[
        str | None, Option(metavar="ID|DIR", help="Another backbone than the checkpoint names.")
    ] = None,
    precision: Annotated[
        str, Option(metavar="|".join(PRECISIONS), help="Number format of the weights.")
    ] = "auto",
    device: Device = "auto",
    max_context: Annotated[
        int | None, Option(metavar="N", min=1, help="Tokens of prompt and answer together.")
    ] = None,
    offline: Annotated[bool, Option("--offline", help="Never use the network.")] = False,
    data_dir: DataDir = None,
) -> LoadRequest:
    """What to load. Raises UsageError."""
    if precision not in PRECISIONS:
        raise UsageError(f"precision is {precision!r}: choose one of {', '.join(PRECISIONS)}")
    place(device, data_dir)
    if offline:
        os.environ["HF_HUB_OFFLINE"] = "1"  # read by huggingface_hub when it is imported
    return LoadRequest(checkpoint, backbone, precision, device, max_context, offline)


def place(device: str, data_dir: Path | None) -> None:
    """Check the device's name; set the data folder for this process and its children."""
    if not DEVICE.fullmatch(device):
        raise UsageError(f"device is {device!r}: choose auto, cpu, cuda, cuda:N or mps")
    if data_dir is not None:
        paths.use_data_dir(data_dir)


def refuse_unknown_tree(tree: str, nodes: int | None = None) -> None:
    """Here and not after the seconds that loading a model takes. Raises UsageError."""
    if tree != "auto":
        load_tree(tree, nodes)


def decode_options(
    drafter: Annotated[
        str | None, Option(metavar="medusa|prompt-lookup|none", help="Who proposes tokens.")
    ] = None,
    acceptance: Annotated[
        str,
        Option(
            metavar="exact|typical|typical-sampled",
            help="Which of them stand. exact is lossless; the typical ones are lossy.",
        ),
    ] = "exact",
    temperature: Annotated[float, Option(help="0 to 2; 0 is greedy.")] = 0.0,
    top_p: Annotated[float, Option(help="0 to 1; 1 is off.")] = 1.0,
    top_k: Annotated[int, Option(help="0 is off.")] = 0,
    posterior_threshold: Annotated[float, Option(help="Epsilon of typical acceptance.")] = 0.09,
    posterior_alpha: Annotated[float, Option(help="Delta of typical acceptance, below 1.")] = 0.3,
    tree: TreeName = "auto",
    nodes: Annotated[
        int | None, Option(metavar="N", help="Cut the tree to N nodes, the root counted.")
    ] = None,
    max_new_tokens: Annotated[int, Option(metavar="N", help="Longest answer.")] = 512,
    seed: Annotated[int | None, Option(metavar="N", help="Fresh unless given.")] = None,
    stop: Annotated[
        list[str] | None, Option(metavar="TEXT", help="End the answer here; repeatable.")
    ] = None,
) -> GenerationSettings:
    """How to decode. Raises UsageError on a value out of range and on an unknown tree."""
    settings = GenerationSettings(
        drafter=drafter,
        acceptance=acceptance,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        posterior_threshold=posterior_threshold,
        posterior_alpha=posterior_alpha,
        tree=tree,
        nodes=nodes,
        max_new_tokens=max_new_tokens,
        seed=seed,
        stop=tuple(stop or ()),
    )
    refuse_unknown_tree(tree, nodes)
    return settings
