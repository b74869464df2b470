"""Drafts with tensors on the CPU."""

import torch

from medusa_chat.decoding.draft import Draft, TreeTensors
from medusa_chat.decoding.tree import Tree

CPU = torch.device("cpu")


def draft_of(tree: Tree, tokens: list[int]) -> Draft:
    return Draft(torch.tensor(tokens), TreeTensors.of(tree, CPU))
