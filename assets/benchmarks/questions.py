"""assets/benchmarks/questions.jsonl anew: python assets/benchmarks/questions.py DATA_FOLDER

The user's first two messages in dialogues that the demo was never trained on (the seed of its
held-out set), eight of each kind, as rows of MT-Bench, for
`medusa-chat bench --study NAME --prompts assets/benchmarks/questions.jsonl`.
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


if __name__ == "__main__":
    main()
