"""The best tree for recorded answers, and the tokens a step it would have given them. No torch.

Rank accuracies, multiplied along a path (Medusa, arXiv 2401.10774, 2.3.3), leave out two things:
the heads are right together more often than independent ones, and a step begins where the draft of
the step before was rejected, where prediction is harder. Here whole paths are counted instead, at
the positions where the steps begin when the answers are decoded with the tree of the last round.
"""

from collections import Counter
from collections.abc import Iterator, Sequence

from medusa_chat.decoding.settings import MAX_NODES
from medusa_chat.decoding.tree import Choice, Tree
from medusa_chat.errors import UsageError

# For one position of an answer as the root: the rank (from 0) that head k gave to the token k + 1
# positions later; None where that is not among its first predictions, or after the answer's end.
Ranks = Sequence[int | None]
Answer = Sequence[Ranks]
ROUNDS = 6


def search_paths(answers: Sequence[Answer], nodes: int, used: int) -> Tree:
    """The tree of at most `nodes` nodes whose first `used` give these answers the most tokens a
    step. Nodes are in order of how often they were right, so the first m of them are a tree.

    Raises UsageError for sizes out of range and for answers in which no head was right.
    """
    if not 1 <= used <= nodes <= MAX_NODES:
        raise UsageError(
            f"nodes is {nodes}, used {used}: nodes is at most {MAX_NODES}, used 1 to nodes"
        )
    roots = [ranks for answer in answers for ranks in answer]
    best, most = Tree.from_choices([]), 0.0
    for _ in range(ROUNDS):
        tree = _most_frequent(roots, nodes)
        roots = [
            answer[place] for answer in answers for place in step_positions(answer, tree.head(used))
        ]
        rate = tokens_per_step(answers, tree.head(used))
        if rate <= most:
            break
        best, most = tree, rate
    if len(best) < min(used, 2):
        raise UsageError("the heads predicted no token of the answers: there is no tree to search")
    return best


def _most_frequent(roots: Sequence[Ranks], nodes: int) -> Tree:
    """The tree of the most frequent paths. No path is more frequent than its parent, so the first
    ones are a tree."""
    counts = Counter(path for ranks in roots for path in _paths(ranks))
    order = sorted(counts.items(), key=lambda item: (-item[1], len(item[0]), item[0]))
    return Tree.from_choices([path for path, _ in order[: nodes - 1]])


def _paths(ranks: Ranks) -> Iterator[Choice]:
    """Every path that would have been accepted from this root, the shortest first."""
    path: tuple[int, ...] = ()
    for rank in ranks:
        if rank is None:
            return
        path = (*path, rank)
        yield path


def step_positions(answer: Answer, tree: Tree) -> Iterator[int]:
    """The positions at which the steps begin when the answer is decoded with this tree."""
    paths, place = set(tree.choices), 0
    while place < len(answer) - 1:
        yield place
        place += 1 + max((len(p) for p in _paths(answer[place]) if p in paths), default=0)


def tokens_per_step(answers: Sequence[Answer], tree: Tree) -> float:
    """The acceleration rate of the tree on these answers, without the first token of each, which
    the prefill gives."""
    steps = sum(1 for answer in answers for _ in step_positions(answer, tree))
    tokens = sum(max(len(answer) - 1, 0) for answer in answers)
    return tokens / steps if steps else 0.0
