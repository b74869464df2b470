"""The errors that medusa-chat reports, each as one line that says what to do. Imports nothing."""


class MedusaChatError(Exception):
    """An error that the user can fix; shown as one line, without a traceback."""

    exit_code = 1


class UsageError(MedusaChatError):
    """Invalid input."""

    exit_code = 2


class ConversationRefused(UsageError):
    """A conversation that the chat template rejects; others may work."""


class DeviceError(MedusaChatError):
    """The requested device is not available."""

    exit_code = 3


class ModelError(MedusaChatError):
    """A checkpoint or backbone that is missing, broken, gated or not supported."""

    exit_code = 4


class ContextError(UsageError):
    """A prompt that is too long for the context."""


class OutOfMemoryError(MedusaChatError):
    """The model or the answer does not fit in memory."""

    exit_code = 5


class LoadStopped(MedusaChatError):
    """The user stopped a load. is_model_lost: whether the previous model was already freed."""

    exit_code = 130
    is_model_lost = False


class PortInUseError(MedusaChatError):
    """The requested port is in use."""

    exit_code = 6


def first_line(error: BaseException) -> str:
    """The first informative line of another library's error, at most 300 characters; a line that
    ends with a colon only introduces the next one."""
    lines = [line.strip() for line in str(error).strip().splitlines()] or [type(error).__name__]
    informative = (line for line in lines if line and not line.endswith(":"))
    return next(informative, lines[0])[:300]


def is_panic(error: BaseException) -> bool:
    """Whether it is a panic in a Rust library, which is not an Exception in Python."""
    return type(error).__name__ == "PanicException"
