"""Options that several commands share: their types, checks, and the requests they make up."""

import os
import re
from pathlib import Path
from typing import Annotated

from typer import Option

from medusa_chat import paths
from medusa_chat.checkpoints.precision import PRECISIONS
from medusa_chat.errors import UsageError
from medusa_chat.messages import LoadRequest
from medusa_chat.trees.presets import load_tree

DEVICE = re.compile(r"auto|cpu|cuda(:\d+)?|mps")

AsJson = Annotated[bool, Option("--json", help="Print JSON.")]
TreeName = Annotated[str, Option(metavar="auto|NAME|FILE", help="The candidate tree.")]

# Every command that loads a model.
Checkpoint = Annotated[
    str, Option(metavar="ID|DIR", help="Medusa checkpoint: a Hub id or a folder.")
]
Backbone = Annotated[
    str | None, Option(metavar="ID|DIR", help="Another backbone than the checkpoint names.")
]
Precision = Annotated[
    str, Option(metavar="|".join(PRECISIONS), help="Number format of the weights.")
]
Device = Annotated[str, Option(metavar="auto|cpu|cuda[:N]|mps", help="Where to compute.")]
MaxContext = Annotated[
    int | None, Option(metavar="N", min=1, help="Tokens of prompt and answer together.")
]
Offline = Annotated[bool, Option("--offline", help="Never use the network.")]
DataDir = Annotated[
    Path | None, Option(metavar="DIR", file_okay=False, help="Keep your files here.")
]

# Every command that decodes.
DrafterName = Annotated[
    str | None, Option(metavar="medusa|prompt-lookup|none", help="Who proposes tokens.")
]
AcceptanceName = Annotated[
    str,
    Option(
        metavar="exact|typical|typical-sampled",
        help="Which of them stand. exact is lossless; the typical ones are lossy.",
    ),
]
Temperature = Annotated[float, Option(help="0 to 2; 0 is greedy.")]
TopP = Annotated[float, Option(help="0 to 1; 1 is off.")]
TopK = Annotated[int, Option(help="0 is off.")]
PosteriorThreshold = Annotated[float, Option(help="Epsilon of typical acceptance.")]
PosteriorAlpha = Annotated[float, Option(help="Delta of typical acceptance, below 1.")]
Nodes = Annotated[
    int | None, Option(metavar="N", help="Cut the tree to N nodes, the root counted.")
]
MaxNewTokens = Annotated[int, Option(metavar="N", help="Longest answer.")]
Seed = Annotated[int | None, Option(metavar="N", help="Fresh unless given.")]
Stop = Annotated[list[str] | None, Option(metavar="TEXT", help="End the answer here; repeatable.")]


def load_request(
    checkpoint: str,
    backbone: str | None,
    precision: str,
    device: str,
    max_context: int | None,
    offline: bool,
    data_dir: Path | None,
) -> LoadRequest:
    """The request to load a model, after `prepare_process`. Raises UsageError."""
    prepare_process(device, data_dir, offline, precision)
    return LoadRequest(checkpoint, backbone, precision, device, max_context, offline)


def prepare_process(
    device: str = "auto",
    data_dir: Path | None = None,
    offline: bool = False,
    precision: str = "auto",
) -> None:
    """Check the names of precision and device; set the data folder and the offline mode for this
    process and its children.

    Call it before huggingface_hub is imported, which reads the offline mode only then. Raises
    UsageError.
    """
    if precision not in PRECISIONS:
        raise UsageError(f"precision is {precision!r}: choose one of {', '.join(PRECISIONS)}")
    if not DEVICE.fullmatch(device):
        raise UsageError(f"device is {device!r}: choose auto, cpu, cuda, cuda:N or mps")
    if data_dir is not None:
        paths.use_data_dir(data_dir)
    if offline:
        os.environ["HF_HUB_OFFLINE"] = "1"


def refuse_unknown_tree(tree: str, nodes: int | None = None) -> None:
    """Refuse a tree before the model is loaded, which takes seconds. Raises UsageError."""
    if tree != "auto":
        load_tree(tree, nodes)
