"""Api: the OpenAI-compatible routes under /v1, on the same session as the page.

ASGI, without Gradio. Access is checked here: the Host header, the API key, and the origin.
"""

import asyncio
import hmac
import json
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from medusa_chat import __version__
from medusa_chat.decoding.events import Event
from medusa_chat.errors import ContextError, UsageError
from medusa_chat.hosts import Hosts, is_local
from medusa_chat.messages import ModelInfo
from medusa_chat.runtime.presets import preset_names
from medusa_chat.runtime.requests import Reply, Ticket
from medusa_chat.runtime.session import Session
from medusa_chat.server.choices import Choice, usage
from medusa_chat.server.requests import ApiError, ApiRequest

MAX_BODY = 16 * 1024 * 1024
BODY_SECONDS = 30.0
MAX_WAITING = 32  # requests, including the running one
LOAD_SECONDS = 30.0  # that a request waits for a model to load
POLL_SECONDS = 0.01  # between two checks for new events
PING_SECONDS = 10.0  # of silence in a stream: proxies and clients give up on a dead connection
SSE = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}
PREFLIGHT_SECONDS = "86400"


@dataclass(frozen=True)
class ApiOptions:
    """Who may send requests. key: required in requests, empty for none. origins: sites whose
    scripts may send requests, "*" for all."""

    key: str = ""
    origins: Sequence[str] = ()


def require_key(host: str, options: ApiOptions, has_login: bool = False) -> None:
    """Raises UsageError if others could send requests without a key: from another machine, or where
    the page requires a password."""
    if not options.key and (has_login or not is_local(host)):
        raise UsageError("others can reach the API: give an --api-key that they must send")


class Api:
    """The API of a session, as an ASGI app.

    hosts: the allowed Host headers, so that other sites cannot rebind their names.
    """

    def __init__(self, session: Session, hosts: Hosts, options: ApiOptions = ApiOptions()) -> None:
        self.session, self.hosts, self.key = session, hosts, options.key
        self.origins = {origin.rstrip("/").lower() for origin in options.origins}
        self.started = int(time.time())
        self.waiting = 0
        self._app = self._routes()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)

    def _routes(self) -> ASGIApp:
        routes = [
            Route("/v1/models", self._guarded(self.models), methods=["GET", "OPTIONS"]),
            Route("/v1/models/{id:path}", self._guarded(self.model), methods=["GET", "OPTIONS"]),
            Route(
                "/v1/chat/completions",
                self._guarded(lambda request: self._answer(request, ApiRequest.of_chat)),
                methods=["POST", "OPTIONS"],
            ),
            Route(
                "/v1/completions",
                self._guarded(lambda request: self._answer(request, ApiRequest.of_completion)),
                methods=["POST", "OPTIONS"],
            ),
        ]
        errors = {404: self._unknown, 405: self._unknown}
        return Starlette(routes=routes, exception_handlers=errors)

    def _guarded(
        self, handle: Callable[[Request], Awaitable[Response]]
    ) -> Callable[[Request], Awaitable[Response]]:
        """A route after the checks of Host, origin and key; errors in OpenAI's format."""

        async def handled(request: Request) -> Response:
            try:
                self._check_origin(request)
                if request.method == "OPTIONS":
                    return self._preflight(request)
                self._check_key(request)
                response = await handle(request)
            except ApiError as error:
                response = _error(error)
            except ClientDisconnect:
                response = Response(status_code=499)
            return self._with_origin(request, response)

        return handled

    async def _unknown(self, request: Request, error: Exception) -> Response:
        path = request.url.path
        missing = ApiError(404, f"there is no {request.method} {path} here", code="unknown_url")
        return self._with_origin(request, _error(missing))

    # ---- Who may ask ----

    def _check_origin(self, request: Request) -> None:
        hosts = request.headers.getlist("host")
        if len(hosts) != 1 or not self.hosts.knows(hosts[0]):
            raise ApiError(403, "this host name is not allowed: use the address that was printed")
        origin = request.headers.get("origin")
        if origin is not None and not self._allows(origin):
            raise ApiError(
                403,
                f"scripts of {origin[:200]} are not allowed: start with --allow-origin {origin}",
            )

    def _allows(self, origin: str) -> bool:
        return "*" in self.origins or origin.rstrip("/").lower() in self.origins

    def _check_key(self, request: Request) -> None:
        if not self.key:
            return
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            given = request.headers.get("api-key", "")
        if not hmac.compare_digest(given.strip().encode(), self.key.encode()):
            raise ApiError(401, "the API key is wrong or missing", code="invalid_api_key")

    def _preflight(self, request: Request) -> Response:
        """The answer to a browser's preflight request, which has no key."""
        asked = request.headers.get("access-control-request-headers", "")
        headers = {
            "Access-Control-Allow-Methods": "GET, POST, OPTIONS",
            "Access-Control-Allow-Headers": asked or "authorization, content-type",
            "Access-Control-Max-Age": PREFLIGHT_SECONDS,
        }
        if "access-control-request-private-network" in request.headers:
            headers["Access-Control-Allow-Private-Network"] = "true"
        return self._with_origin(request, Response(status_code=204, headers=headers))

    def _with_origin(self, request: Request, response: Response) -> Response:
        origin = request.headers.get("origin")
        if origin is not None and self._allows(origin):
            response.headers["Access-Control-Allow-Origin"] = origin
            response.headers["Vary"] = "Origin"
        response.headers["X-Content-Type-Options"] = "nosniff"
        return response

    # ---- Models ----

    async def models(self, request: Request) -> Response:
        """The loaded model, alone and with each preset, without asking the worker: clients wait
        only seconds for this."""
        listed = [self._model_json(name) for name in self._names()]
        return JSONResponse({"object": "list", "data": listed})

    async def model(self, request: Request) -> Response:
        """The model by its id."""
        asked = request.path_params["id"]
        if asked not in self._names():
            raise ApiError(404, f"the model that is loaded is {self._name}", code="model_not_found")
        return JSONResponse(self._model_json(asked))

    def _names(self) -> list[str]:
        return [self._name, *(f"{self._name}@{preset}" for preset in preset_names())]

    @property
    def _name(self) -> str:
        """The name of the loaded model, or of the one being loaded."""
        model, asked = self.session.state.model, self.session.lifecycle.requested
        return model.name if model else asked.checkpoint if asked else "none"

    def _model_json(self, name: str) -> dict[str, Any]:
        made = {"id": name, "object": "model", "created": self.started, "owned_by": "medusa-chat"}
        model = self.session.state.model
        return made | ({"max_model_len": model.context} if model else {})

    # ---- Answers ----

    async def _answer(
        self, request: Request, read: Callable[[bytes, ModelInfo], ApiRequest]
    ) -> Response:
        body = await _body(request)
        model = await self._ready_model()
        asked = read(body, model)
        if self.waiting >= MAX_WAITING:
            raise ApiError(429, f"{self.waiting} requests are waiting: try again in a moment")
        answer = _Answer(self.session, asked, model)
        self.waiting += 1
        try:
            first = await answer.begin(request)
        except BaseException:
            self.waiting -= 1
            answer.close()
            raise
        if asked.is_streamed:
            return StreamingResponse(self._streamed(answer, first), headers=SSE)
        try:
            return JSONResponse(await answer.whole(request, first))
        finally:
            self.waiting -= 1
            answer.close()

    async def _streamed(self, answer: "_Answer", first: list[Event]) -> AsyncIterator[bytes]:
        try:
            async for line in answer.stream(first):
                yield line
        finally:  # a client that is gone ends the answer at its next step
            self.waiting -= 1
            answer.close()

    async def _ready_model(self) -> ModelInfo:
        """The model, once it is loaded. Raises ApiError where none comes in time."""
        until = time.monotonic() + LOAD_SECONDS
        while (state := self.session.state).status == "loading" and time.monotonic() < until:
            await asyncio.sleep(0.1)
        if state.model is None:
            why = state.message or "the model is being loaded"
            raise ApiError(503, f"{why}: try again in a moment")
        return state.model


class _Answer:
    """The choices of one request, asked of the session one after the other."""

    def __init__(self, session: Session, asked: ApiRequest, model: ModelInfo) -> None:
        self.session, self.asked, self.model = session, asked, model
        has_logprobs = asked.logprobs is not None
        self.choices = [
            Choice(index, asked.is_chat, has_logprobs) for index in range(len(asked.replies))
        ]
        self._ticket: Ticket[Event] | None = None
        kind = "chat.completion" if asked.is_chat else "text_completion"
        self._head = {
            "id": f"{'chatcmpl' if asked.is_chat else 'cmpl'}-{secrets.token_hex(12)}",
            "object": f"{kind}.chunk" if asked.is_chat and asked.is_streamed else kind,
            "created": int(time.time()),
            "model": f"{model.name}@{asked.preset}" if asked.preset else model.name,
            "system_fingerprint": f"medusa-chat-{__version__}-{model.precision}",
        }

    async def begin(self, request: Request) -> list[Event]:
        """Ask for the first choice, and wait for the first of its events, so that a prompt that is
        refused gets an error and no stream. Raises ApiError."""
        self._submit(self.asked.replies[0])
        begun = time.monotonic()
        while not (events := self._take(0)):
            if self.asked.is_streamed and time.monotonic() > begun + PING_SECONDS:
                return []
            await _pause(request)
        return events

    async def whole(self, request: Request, first: list[Event]) -> dict[str, Any]:
        """The answer that is not streamed. Raises ApiError."""
        for place, choice in enumerate(self.choices):
            async for event in self._events(place, first if place == 0 else [], request):
                if event is not None:
                    for _ in choice.add(event):
                        pass
        choices = [choice.to_json() for choice in self.choices]
        return {**self._head, "choices": choices, "usage": usage(self.choices)}

    async def stream(self, first: list[Event]) -> AsyncIterator[bytes]:
        """The lines of server-sent events; an error that comes late is the last of them."""
        try:
            for place, choice in enumerate(self.choices):
                async for event in self._events(place, first if place == 0 else []):
                    if event is None:
                        yield b": ping\n\n"
                        continue
                    for told in choice.add(event):
                        yield self._chunk([told])
            if self.asked.includes_usage:
                yield self._chunk([])
        except ApiError as error:
            yield _line(error.to_json())
            return
        yield b"data: [DONE]\n\n"

    def close(self) -> None:
        """Give up what still runs."""
        if self._ticket is not None and not self._ticket.done.is_set():
            self.session.cancel(self._ticket)

    def _chunk(self, choices: list[dict[str, Any]]) -> bytes:
        chunk = {**self._head, "choices": choices}
        if self.asked.includes_usage:
            chunk["usage"] = None if choices else usage(self.choices)
        return _line(chunk)

    def _submit(self, reply: Reply) -> None:
        self._ticket = self.session.watched = self.session.submit(reply)

    async def _events(
        self, place: int, first: list[Event], request: Request | None = None
    ) -> AsyncIterator[Event | None]:
        """The events of a choice, from `first` on; None after PING_SECONDS without one."""
        if place:
            self._submit(self.asked.replies[place])
        seen, spoke = 0, time.monotonic()
        while True:
            ticket = self._ticket
            assert ticket is not None
            is_over = ticket.done.is_set()  # before the trace is read: nothing follows it
            events = first or self._take(seen)
            first = []
            for event in events:
                yield event
            seen += len(events)
            if events:
                spoke = time.monotonic()
            elif is_over:
                return
            elif time.monotonic() > spoke + PING_SECONDS:
                spoke = time.monotonic()
                yield None
            else:
                await _pause(request)

    def _take(self, seen: int) -> list[Event]:
        """The events from number `seen` on. Raises ApiError where the request failed."""
        ticket = self._ticket
        assert ticket is not None
        is_over = ticket.done.is_set()
        events = ticket.trace[seen:]
        if not events and is_over and ticket.error:
            raise self._failure(ticket)
        return events

    def _failure(self, ticket: Ticket[Event]) -> ApiError:
        """The error of a request: what asking again cannot mend is a 400, for clients try all
        others up to three times."""
        cause = ticket.cause
        if isinstance(cause, ContextError):
            context = f"this model's maximum context length is {self.model.context} tokens"
            message = f"{context}: {ticket.error}"
            return ApiError(400, message, code="context_length_exceeded", param="messages")
        if isinstance(cause, UsageError):
            return ApiError(400, ticket.error)
        return ApiError(503 if self.session.state.status == "loading" else 500, ticket.error)


async def _body(request: Request) -> bytes:
    """The body of a request. Raises ApiError for one that is too large or too slow."""
    data = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in request.stream():
                data += part
                if len(data) > MAX_BODY:
                    most = f"at most {MAX_BODY // 1024**2} MB"
                    raise ApiError(413, f"the request is too large: {most} are taken")
    except TimeoutError:
        raise ApiError(408, "the request took too long to arrive") from None
    return bytes(data)


async def _pause(request: Request | None) -> None:
    """A moment's wait. Raises ClientDisconnect where the client is gone."""
    if request is not None and await request.is_disconnected():
        raise ClientDisconnect
    await asyncio.sleep(POLL_SECONDS)


def _error(error: ApiError) -> Response:
    headers = {"Retry-After": "2"} if error.status in (429, 503) else None
    return JSONResponse(error.to_json(), error.status, headers=headers)


def _line(value: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(value, ensure_ascii=False).encode() + b"\n\n"
