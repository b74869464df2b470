"""Events of a training."""

import json


def step(number: int, steps: int = 300, heads: int = 2) -> str:
    top = [[number / steps / (head + 1), 0.9] for head in range(heads)]
    loss = 4.0 - number / steps
    return json.dumps(
        {"event": "step", "step": number, "steps": steps, "loss": loss, "top": top, "lm_loss": None}
    )
