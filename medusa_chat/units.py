"""Numbers, bytes and seconds as text. Imports nothing."""


def gb(count: float) -> str:
    """Bytes with three digits: 13.5 GB, 101 MB, 3 kB."""
    return _largest(count, ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)) or f"{count:.0f} bytes"


def number(count: float) -> str:
    """A large number with three digits: 3.37 million, 135 million, 6.74 billion."""
    return _largest(count, ("billion", 1e9), ("million", 1e6)) or f"{count:,.0f}"


def _largest(count: float, *units: tuple[str, float]) -> str:
    """A number in the largest unit that gives at least 1 when rounded, or ""."""
    for unit, size in units:
        if count >= 0.9995 * size:
            value = count / size
            return f"{value:.0f} {unit}" if value >= 99.95 else f"{value:.3g} {unit}"
    return ""


def clock(seconds: float) -> str:
    """Seconds as 1:05 or 2:03:04."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def duration(seconds: float) -> str:
    """A time with three digits: 4.56 ms, 444 ms, 1.32 s, 59.9 s; minutes from 100 s on: 2:05."""
    if seconds >= 99.95:
        return clock(seconds)
    return _largest(seconds, ("s", 1), ("ms", 1e-3)) or f"{seconds * 1000:.2f} ms"


def transfer(done: int, total: int, rate: float | None) -> list[str]:
    """Progress of a download: percentage, bytes and, if the rate is known, speed and time left."""
    parts = [f"{100 * done // total if total else 100}%", f"{gb(done)} of {gb(total)}"]
    return [*parts, f"{gb(rate)}/s", f"{clock((total - done) / rate)} left"] if rate else parts
