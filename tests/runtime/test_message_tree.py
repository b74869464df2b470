"""The tree of messages: versions stay, one path is shown."""

from medusa_chat.runtime.message_tree import MessageTree


def conversation():
    return MessageTree().plus("user", "q1").plus("assistant", "a1").plus("user", "q2")


def texts(tree):
    return [one.content for one in tree.path]


def test_a_message_beside_another_is_a_version_and_both_stay_reachable():
    tree = conversation().head(2).plus("user", "q2b").plus("assistant", "a2b")
    assert texts(tree) == ["q1", "a1", "q2b", "a2b"] and tree.versions(4) == (3, 4)
    older = tree.showing(3)
    assert texts(older) == ["q1", "a1", "q2"] and texts(older.showing(4)) == texts(tree)
    first = older.head(0).plus("user", "q1b")
    assert first.versions(1) == (1, 6) and texts(first) == ["q1b"]
    assert texts(first.showing(1)) == texts(tree)  # what came after it last


def test_a_message_goes_with_what_follows_it_and_its_id_is_not_given_again():
    tree = conversation().head(1).plus("assistant", "a1b")
    less = tree.without(2)
    assert texts(less) == ["q1", "a1b"] and set(less.said) == {1, 4}
    none = tree.without(1)
    assert texts(none) == [] and not none.said and none.plus("user", "x").leaf == 5


def test_a_tree_comes_back_from_its_json():
    tree = conversation().head(1).plus("assistant", "a1b", "stopped", (2, 3))
    assert MessageTree.from_json(tree.to_json()) == tree
    assert MessageTree.from_json(MessageTree().to_json()) == MessageTree()
