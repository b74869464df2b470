"""Accessibility findings of a page, by axe."""


def findings(tab) -> list[str]:
    """Serious and critical findings, a line each: rule, element, what is wrong."""
    from axe_playwright_python.sync_playwright import Axe

    found = []
    for violation in Axe().run(tab).response["violations"]:
        if violation["impact"] not in ("serious", "critical"):
            continue
        for node in violation["nodes"]:
            target = " ".join(map(str, node["target"]))
            said = node["failureSummary"].replace("\n", " ")
            found.append(f"{violation['id']}: {target}: {said}")
    return found
