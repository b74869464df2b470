"""Headers: what every answer of the page carries, for its safety and for what is to be told."""

from starlette.datastructures import MutableHeaders
from starlette.types import Message, Send

from medusa_chat.ui.access.notices import HEADER, told

# Gradio 6.31 runs inline scripts and compiles templates: escaping stays the first defence.
# No pictures from here: the page's own are data, and one that a model writes would ask for /logout.
POLICY = (
    "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval'; "
    "style-src 'self' 'unsafe-inline'; img-src data: blob:; font-src 'self' data:; "
    "media-src blob:; connect-src 'self'; worker-src 'self' blob:; frame-src 'none'; "
    "object-src 'none'; base-uri 'self'; form-action 'self'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), microphone=(), geolocation=()",
}


def with_headers(send: Send) -> Send:
    """The answer with our security headers, and with what its browser is to be told."""

    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            for name, value in HEADERS.items():
                headers[name] = value
            if notices := told():
                headers[HEADER] = notices
        await send(message)

    return sending
