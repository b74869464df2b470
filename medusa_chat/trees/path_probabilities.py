"""PathProbabilities: how likely each path of a tree is, from what was counted in chats."""

from collections import defaultdict

from medusa_chat.decoding.tree import Choice, Tree
from medusa_chat.trees.acceptance_fold import AcceptanceFold, Count, smoothed_share
from medusa_chat.trees.expected_length import Accuracies

PATH_WEIGHT = 20  # the share of similar paths counts as so many askings of a path


class PathProbabilities:
    """The probability that the text follows a path: the product, along the path, of

        (right + PATH_WEIGHT * similar) / (asked + PATH_WEIGHT)

    the share of a rank given that the text followed the path above it. `similar` is the share over
    all paths of the same depth and last rank whose upper part left the heads' first choice as often
    (0, 1, 2 or more times), smoothed in the same way by the rank's own accuracy: heads tend to be
    right together and wrong together. The stored accuracy of a rank that was never drafted in these
    chats is multiplied by `unseen`.
    """

    def __init__(self, fold: AcceptanceFold, prior: Accuracies, unseen: float = 1.0) -> None:
        self._paths, self.table = fold.paths, fold.table(prior)
        for head, row in enumerate(self.table):
            for rank in range(len(row)):
                if not fold.ranks.get((head, rank), [0, 0])[1]:
                    row[rank] *= unseen
        self._similar: dict[Choice, Count] = defaultdict(lambda: [0, 0])
        for choice, (right, asked) in fold.paths.items():
            similar = self._similar[_similarity_key(choice)]
            similar[0] += right
            similar[1] += asked

    def share(self, choice: Choice) -> float:
        """The probability of the last rank of a path, given that the text followed the rest."""
        row = self.table[len(choice) - 1]
        known = row[choice[-1]] if choice[-1] < len(row) else 0.0
        similar = smoothed_share(self._similar.get(_similarity_key(choice)), known, PATH_WEIGHT)
        return smoothed_share(self._paths.get(choice), similar, PATH_WEIGHT)

    def expected(self, tree: Tree) -> tuple[float, ...]:
        """Expected tokens a step with the first 1, 2, ... n nodes of a tree."""
        probability: dict[Choice, float] = {(): 1.0}
        sums = [1.0]
        for choice in tree.choices[1:]:
            probability[choice] = probability[choice[:-1]] * self.share(choice)
            sums.append(sums[-1] + probability[choice])
        return tuple(sums)


def _similarity_key(choice: Choice) -> Choice:
    """The key that groups similar paths: depth, misses above, last rank."""
    return len(choice), min(2, sum(rank > 0 for rank in choice[:-1])), choice[-1]
