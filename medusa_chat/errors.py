"""The errors medusa-chat reports: one line each that says what to do. It imports nothing."""


class MedusaChatError(Exception):
    """An error that the user can act on; shown as one line, without a traceback."""

    exit_code = 1


class UsageError(MedusaChatError):
    """Input outside its allowed range or form."""

    exit_code = 2


class ConversationRefused(UsageError):
    """A conversation that a chat template does not take; it may take others."""


class DeviceError(MedusaChatError):
    """The requested device is not available."""

    exit_code = 3


class ModelError(MedusaChatError):
    """A checkpoint or backbone that is missing, broken, gated or refused."""

    exit_code = 4


class ContextError(UsageError):
    """A prompt that leaves no room in the context."""


class OutOfMemoryError(MedusaChatError):
    """The model or the answer does not fit in memory."""

    exit_code = 5


class LoadStopped(MedusaChatError):
    """The user stopped a load. is_model_lost: whether the model loaded before is gone as well."""

    exit_code = 130
    is_model_lost = False


class PortInUseError(MedusaChatError):
    """The requested port is in use."""

    exit_code = 6


def first_line(error: BaseException) -> str:
    """The first line of another library's error message that tells something, at most 300
    characters: one that ends with a colon only announces the next."""
    lines = [line.strip() for line in str(error).strip().splitlines()] or [type(error).__name__]
    told = (line for line in lines if line and not line.endswith(":"))
    return next(told, lines[0])[:300]


def is_panic(error: BaseException) -> bool:
    """Whether it is the panic of a library written in Rust, which is no Exception in Python."""
    return type(error).__name__ == "PanicException"
