"""HttpTab: a browser tab as the server sees it, without a browser."""

import json
import re
import secrets
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import httpx

from support.waiting import wait_for


class HttpTab:
    """Posts what a tab's script posts. client: of the page's address; name: made up by the tab."""

    def __init__(self, client: httpx.Client, name: str = "", config: Any = None) -> None:
        self.client = client
        self.name = name or secrets.token_hex(6)
        self.config = config or client.get("/config").json()

    @cached_property
    def components(self) -> dict[int, Any]:
        return {one["id"]: one for one in self.config["components"]}

    def events(self, block: str, event: str) -> list[Any]:
        """The events of the block with this id; of the page itself: "load"."""

        def is_meant(target: list[Any]) -> bool:
            props = self.components.get(target[0], {}).get("props", {})
            return target[1] == event and props.get("elem_id", "") == block

        return [one for one in self.config["dependencies"] if any(map(is_meant, one["targets"]))]

    def post(self, event: Any, **values: Any) -> httpx.Response:
        """An event with what stands in its inputs. values: of inputs, by their block's id."""
        shown = [self.components[one] for one in event["inputs"]]
        data = [values.get(one["props"].get("elem_id"), one["props"].get("value")) for one in shown]
        data = [None if one["type"] == "state" else v for one, v in zip(shown, data, strict=True)]
        body = {"fn_index": event["id"], "data": data, "session_hash": self.name}
        return self.client.post("/gradio_api/run/predict", json=body)

    def open(self, **known: str) -> httpx.Response:
        """What a page posts once it is loaded; the answer with the whole view. known: what its
        browser keeps of conversations."""
        answers = [
            self.post(event, next=json.dumps(known)).raise_for_status()
            for event in self.events("", "load")
        ]
        return max(answers, key=lambda one: len(one.text))

    def tick(self) -> httpx.Response:
        return self.post(self.events("next", "tick")[0])

    @contextmanager
    def connected(self):
        """The connection that a tab holds as long as it is open."""
        with self.client.stream("GET", f"/gradio_api/heartbeat/{self.name}") as stream:
            signs = stream.iter_raw()  # forgotten, it would end the connection
            next(signs)
            yield

    def ask(self, text: str) -> None:
        """Send a message, and read the stream of its answer until it is there."""
        sent = self.post(self.events("send", "click")[0], box=text).raise_for_status()
        key = re.search(r'key\\+":\\+"([\w-]+)', sent.text)[1]
        self.client.get("/live", headers={"x-medusa-tab": key}).raise_for_status()
        wait_for(lambda: "Send next" not in self.redrawn())

    def redrawn(self) -> str:
        return self.post(self.events("next", "redraw")[0]).raise_for_status().text

    def start_anew(self) -> None:
        """An empty conversation."""
        self.post(self.events("clear", "click")[0]).raise_for_status()
