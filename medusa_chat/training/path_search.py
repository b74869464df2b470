"""The tree that whole answers ask for, and the tokens a step it would have given them. No torch.

Rank accuracies, multiplied along a path (Medusa, arXiv 2401.10774, 2.3.3), leave out two things:
the heads are right together more often than that, and a step begins where the one before failed,
where foreseeing is harder. Here both are in: the paths are counted as they were, at the places
where steps of the tree found so far begin.
"""

from collections import Counter
from collections.abc import Iterator, Sequence

from medusa_chat.decoding.settings import MAX_NODES
from medusa_chat.decoding.tree import Choice, Tree
from medusa_chat.errors import UsageError

# Of one place in an answer, as root: which of head k's predictions was the token k + 1 places on,
# from 0; None where none of those looked at was, or where the answer had ended.
Ranks = Sequence[int | None]
Answer = Sequence[Ranks]
ROUNDS = 6


def search_paths(answers: Sequence[Answer], nodes: int, used: int) -> Tree:
    """The tree of at most `nodes` nodes whose first `used` give these answers the most tokens a
    step. Nodes come in order of how often they were right, so every first m of them are a tree.

    Raises UsageError for sizes out of range and for answers in which nothing was foreseen.
    """
    if not 1 <= used <= nodes <= MAX_NODES:
        raise UsageError(f"nodes is {nodes} and used {used}: 1 <= used <= nodes <= {MAX_NODES}")
    begun = [ranks for answer in answers for ranks in answer]
    best, most = Tree.from_choices([]), 0.0
    for _ in range(ROUNDS):
        tree = _most_frequent(begun, nodes)
        begun = [
            answer[place] for answer in answers for place in step_positions(answer, tree.head(used))
        ]
        rate = tokens_per_step(answers, tree.head(used))
        if rate <= most:
            break
        best, most = tree, rate
    if len(best) < min(used, 2):
        raise UsageError("no answer has a token that the heads foresaw: there is no tree to search")
    return best


def _most_frequent(begun: Sequence[Ranks], nodes: int) -> Tree:
    """A path is never more frequent than its beginning: the first ones are always a tree."""
    counts = Counter(path for ranks in begun for path in _paths(ranks))
    order = sorted(counts.items(), key=lambda item: (-item[1], len(item[0]), item[0]))
    return Tree.from_choices([path for path, _ in order[: nodes - 1]])


def _paths(ranks: Ranks) -> Iterator[Choice]:
    """Every path from this place that would have been accepted, the shortest first."""
    path: tuple[int, ...] = ()
    for rank in ranks:
        if rank is None:
            return
        path = (*path, rank)
        yield path


def step_positions(answer: Answer, tree: Tree) -> Iterator[int]:
    """Where in the answer the steps begin when it is decoded with this tree."""
    paths, place = set(tree.choices), 0
    while place < len(answer) - 1:
        yield place
        place += 1 + max((len(p) for p in _paths(answer[place]) if p in paths), default=0)


def tokens_per_step(answers: Sequence[Answer], tree: Tree) -> float:
    """The acceleration rate of the tree on these answers, the first token of each left out."""
    steps = sum(1 for answer in answers for _ in step_positions(answer, tree))
    tokens = sum(max(len(answer) - 1, 0) for answer in answers)
    return tokens / steps if steps else 0.0
