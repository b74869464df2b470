"""PathProbabilities: what the paths of a tree are worth, by what was counted in chats."""

from collections import defaultdict

from medusa_chat.decoding.accept_length import Accuracies
from medusa_chat.decoding.tree import Choice, Tree
from medusa_chat.trees.acceptance_counts import AcceptanceFold, Count, drawn

PATH_WEIGHT = 20  # what is alike counts as so many askings of a path


class PathProbabilities:
    """What paths are worth by a fold: the chance that a path is what comes, rank by rank

        (right + PATH_WEIGHT * alike) / (asked + PATH_WEIGHT)

    multiplied along it; asked where the path above came. `alike` is the same share of all paths
    with that last rank whose upper part missed the heads' first choice as often (0, 1, 2 or more
    times), drawn in the same way towards the rank's share in the table: heads are right together,
    and where one missed, the next one misses more. A rank that its head never drafted at all is
    worth `unseen` of what is stored: other texts say so, these do not.
    """

    def __init__(self, fold: AcceptanceFold, prior: Accuracies, unseen: float = 1.0) -> None:
        self._paths, self.table = fold.paths, fold.table(prior)
        for head, row in enumerate(self.table):
            for rank in range(len(row)):
                if not fold.ranks.get((head, rank), [0, 0])[1]:
                    row[rank] *= unseen
        self._alike: dict[Choice, Count] = defaultdict(lambda: [0, 0])
        for choice, (right, asked) in fold.paths.items():
            alike = self._alike[_alike(choice)]
            alike[0] += right
            alike[1] += asked

    def share(self, choice: Choice) -> float:
        """The chance of the last rank of a path where the rest of it came."""
        row = self.table[len(choice) - 1]
        known = row[choice[-1]] if choice[-1] < len(row) else 0.0
        alike = drawn(self._alike.get(_alike(choice)), known, PATH_WEIGHT)
        return drawn(self._paths.get(choice), alike, PATH_WEIGHT)

    def expected(self, tree: Tree) -> tuple[float, ...]:
        """Tokens a step with the first 1, 2, ... n nodes of a tree."""
        worth: dict[Choice, float] = {(): 1.0}
        sums = [1.0]
        for choice in tree.choices[1:]:
            worth[choice] = worth[choice[:-1]] * self.share(choice)
            sums.append(sums[-1] + worth[choice])
        return tuple(sums)


def _alike(choice: Choice) -> Choice:
    """What a path shares with those it is compared to: depth, misses above, last rank."""
    return len(choice), min(2, sum(rank > 0 for rank in choice[:-1])), choice[-1]
