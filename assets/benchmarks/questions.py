"""questions.jsonl and conversations.jsonl anew: python assets/benchmarks/questions.py DATA_FOLDER

questions.jsonl: the user's first two messages in dialogues that the demo was never trained on (the
seed of its held-out set), eight of each kind, as rows of MT-Bench, for
`medusa-chat bench --study NAME --prompts assets/benchmarks/questions.jsonl`. conversations.jsonl:
whole dialogues of another seed, which the studies that train learn from (`--data`).
"""

import json
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "demo"))
import dialogues  # noqa: E402
from backbone import Recipe  # noqa: E402

EACH = 8
DRAWN = 2000
TURNS = 2
CONVERSATIONS = 600


def main() -> None:
    found: dict[str, dict[str, list[str]]] = {}
    folder = Path(sys.argv[1]) / "train/templates_raw"
    for row in dialogues.generate(folder, DRAWN, Recipe().seed + 1):
        kind = row["source"].partition("/")[2]
        turns = [m["content"] for m in row["messages"] if m["role"] == "user"]
        kept = found.setdefault(kind, {})
        if len(kept) < EACH:
            kept.setdefault(turns[0], turns[:TURNS])
    asked = [(kind, turns) for kind in sorted(found) for turns in found[kind].values()]
    rows = [
        {"question_id": number, "category": kind, "turns": turns}
        for number, (kind, turns) in enumerate(asked, start=1)
    ]
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    (HERE / "questions.jsonl").write_text(lines, "utf-8")
    print(f"{len(rows)} questions of {len(found)} kinds")
    write_conversations(folder, HERE / "conversations.jsonl")


def write_conversations(folder: Path, file: Path) -> None:
    """Of a seed that neither the demo's training nor its tests used."""
    rows = dialogues.generate(folder, CONVERSATIONS, Recipe().seed + 23)
    lines = (json.dumps({"messages": row["messages"]}, ensure_ascii=False) for row in rows)
    file.write_text("".join(line + "\n" for line in lines), "utf-8")


if __name__ == "__main__":
    main()
