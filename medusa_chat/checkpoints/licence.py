"""Licence: what a model's own files say of the licence of its weights."""

import re

from medusa_chat.checkpoints.layouts.gguf_header import read_gguf
from medusa_chat.checkpoints.layouts.source import Source
from medusa_chat.checkpoints.locate import Checkpoint
from medusa_chat.checkpoints.places import opened
from medusa_chat.errors import ModelError
from medusa_chat.hub.catalog import model_preset

README_BYTES = 4096
LINE = re.compile(r"^license(?:_name)?:\s*[\"']?([\w .+-]{2,60}?)[\"']?\s*$", re.M)
MOST = 60  # characters of a GGUF file's


def licence_of(source: Source) -> str:
    """What the front of a repo's README says; empty where it says nothing."""
    try:
        return _front(source) if "README.md" in source.files() else ""
    except ModelError:
        return ""


def _front(source: Source) -> str:
    """The same of a README that may not be there, without a list of the files."""
    try:
        front = source.read("README.md", 0, README_BYTES)
    except ModelError:
        return ""
    head = front.decode("utf-8", "replace").partition("---")[2].partition("---")[0]
    match = LINE.search(head)
    return match[1] if match else ""


def licence_here(found: Checkpoint) -> str:
    """The licence of the backbone's weights that are loaded: of a known checkpoint as we know it,
    else as the file or the README beside it says; empty where nobody does."""
    preset = model_preset(found.name)
    if preset is not None and preset.licence:
        return preset.licence
    if not found.weights.stored:
        return _front(opened(found.backbone))
    header = read_gguf(opened(found.source), found.source.name)
    said = str(header.metadata.get("general.license", ""))
    return said if said.isprintable() and len(said) <= MOST else ""
