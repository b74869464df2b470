"""Accessibility findings of a page, by axe."""

# Findings inside Gradio's own markup that a page cannot change: rule -> part of the selector, why.
GRADIOS_OWN: dict[str, tuple[str, str]] = {}


def findings(tab) -> list[str]:
    """Serious and critical findings, a line each: rule, element, what is wrong."""
    from axe_playwright_python.sync_playwright import Axe

    found = []
    for violation in Axe().run(tab).response["violations"]:
        if violation["impact"] not in ("serious", "critical"):
            continue
        part, _ = GRADIOS_OWN.get(violation["id"], ("\0", ""))
        for node in violation["nodes"]:
            target = " ".join(map(str, node["target"]))
            if part not in target:
                said = node["failureSummary"].replace("\n", " ")
                found.append(f"{violation['id']}: {target}: {said}")
    return found
