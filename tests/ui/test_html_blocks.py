"""The scripts of the page's own blocks."""

import re

import pytest

from medusa_chat.paths import asset
from medusa_chat.ui.page.html_blocks import PARTS

DECLARED = re.compile(r"^(?:async )?(?:const|let|function|class) +(\w+|[{\[][^=]*[}\]])", re.M)


@pytest.mark.parametrize("block", sorted(PARTS))
def test_the_parts_of_a_block_declare_no_name_twice(block):
    """They stand in one scope, where a second declaration is a syntax error of them all."""
    declared: dict[str, str] = {}
    for part in ("elements", *PARTS[block], block):
        found = DECLARED.findall(asset("js", f"{part}.js").read_text(encoding="utf-8"))
        for name in (n for names in found for n in re.findall(r"\w+(?=\s*(?:[,}\]]|$))", names)):
            assert name not in declared, f"{name} is in {declared[name]}.js and in {part}.js"
            declared[name] = part
