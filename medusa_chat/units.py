"""Bytes and seconds as text. It imports nothing."""


def gb(count: float) -> str:
    """Bytes with three digits: 13.5 GB, 101 MB, 3 kB."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= 0.9995 * size:
            value = count / size
            return f"{value:.0f} {unit}" if value >= 99.95 else f"{value:.3g} {unit}"
    return f"{count:.0f} bytes"


def clock(seconds: float) -> str:
    """Seconds as 1:05 or 2:03:04."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def transfer(done: int, total: int, rate: float | None) -> list[str]:
    """The state of a download: share, bytes, and where the rate is known speed and time left."""
    parts = [f"{100 * done // total if total else 100}%", f"{gb(done)} of {gb(total)}"]
    return [*parts, f"{gb(rate)}/s", f"{clock((total - done) / rate)} left"] if rate else parts
