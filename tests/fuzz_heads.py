"""Mutated files of heads against the pickle sandbox: `python tests/fuzz_heads.py 10000 [SEED]`.

Half are .safetensors, half .pt; each is a good file with a few bytes flipped, cut, moved, doubled
or made large, in its header as often as in its data. Every file must be taken or refused in one
line. What the sandbox lets through goes on, in this process, to torch and the heads themselves.
A canary that code in a file would touch must never appear. Exit code 1 if anything else happens.
"""

import hashlib
import os
import pickle
import random
import re
import sys
import tempfile
import zipfile
from collections import Counter
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from time import monotonic, process_time

import torch
from safetensors import safe_open
from safetensors.torch import save
from support.checkpoints import layered, with_bias, with_own
from support.pickles import run_here

from medusa_chat.checkpoints import pickle_sandbox
from medusa_chat.checkpoints.head_weights import heads_of
from medusa_chat.checkpoints.layouts.headers import read_header
from medusa_chat.checkpoints.layouts.heads_file import read_heads
from medusa_chat.checkpoints.layouts.source import LocalFolder
from medusa_chat.errors import ModelError

SLOW = 10.0  # seconds of computing of our own that no file of a few kilobytes may take
BATCH = 500  # files that lie in the folder at a time
INTERESTING = (0, 1, 0x7F, 0x80, 0xFF, ord('"'), ord("{"), ord("["), ord("9"), ord("-"), ord("."))


@dataclass
class FuzzCounts:
    """What became of the files."""

    files: int = 0
    refused: int = 0
    taken: int = 0
    slowest: float = 0.0
    kinds: Counter = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    def lines(self):
        yield (
            f"{self.files} files: {self.refused} refused, {self.taken} taken, "
            f"{len(self.failures)} failures; slowest {self.slowest:.2f} s"
        )
        yield from (f"  {count:6} {kind}" for kind, count in self.kinds.most_common(30))
        yield from (f"  FAILURE {failure}" for failure in self.failures[:20])


class Canary:
    """Unpickling this leaves a file behind."""

    def __init__(self, file):
        self.file = str(file)

    def __reduce__(self):
        return os.mkdir, (self.file,)


def seeds(canary):
    """Good files, and one whose pickle would run code."""
    heads = with_bias({name: tensor[:8, :8] for name, tensor in layered(heads=2).items()})
    heads = {name: tensor[:8].contiguous() for name, tensor in heads.items()}
    heads = with_own(heads, torch.ones(5, 8), heads=2)
    plain, evil = BytesIO(), BytesIO()
    torch.save(heads, plain)
    with zipfile.ZipFile(evil, "w") as made:
        made.writestr("a/data.pkl", pickle.dumps({"0.0.linear.weight": Canary(canary)}, 2))
        made.writestr("a/data/0", bytes(256))
    half = BytesIO()
    torch.save({name: tensor.half() for name, tensor in heads.items()}, half)
    wide = {name: tensor.bfloat16() for name, tensor in heads.items()}
    pickles = [plain.getvalue(), half.getvalue(), evil.getvalue()]
    return [(".safetensors", save(heads)), (".safetensors", save(wide))] * 3 + [
        (".pt", data) for data in [*pickles, *pickles]
    ]


def mutated(data, chance):
    """A copy with one to eight small injuries: in half of the files anywhere, every second of
    those in the first fifth; in the others behind the outer wall, which is made whole again."""
    if chance.random() < 0.5:
        return injured(data, chance)
    return inside_zip(data, chance) if data[:2] == b"PK" else inside_header(data, chance)


def inside_zip(data, chance):
    """The pickle or one storage injured, in an archive that is right."""
    with zipfile.ZipFile(BytesIO(data)) as old:
        entries = {name: old.read(name) for name in old.namelist()}
    program = next(name for name in entries if name.endswith("data.pkl"))
    name = program if chance.random() < 0.8 else chance.choice(sorted(entries))
    entries[name] = injured(entries[name], chance)
    made = BytesIO()
    with zipfile.ZipFile(made, "w") as new:
        for entry, content in entries.items():
            new.writestr(entry, content)
    return made.getvalue()


def inside_header(data, chance):
    """The JSON of a safetensors file injured, and its length right."""
    length = int.from_bytes(data[:8], "little")
    header = data[8 : 8 + length]
    if chance.random() < 0.5:
        header = renumbered(header, chance)
    else:
        header = injured(header, chance)
    return len(header).to_bytes(8, "little") + header + data[8 + length :]


def renumbered(header, chance):
    """JSON that stays JSON: one number or name of it is another one."""
    words = re.split(rb"([0-9]+)", header)
    place = chance.randrange(1, len(words), 2)
    words[place] = chance.choice((b"0", b"1", b"2", b"8", b"64", b"256", b"99999999999", b"1e3"))
    return b"".join(words)


def injured(data, chance):
    data = bytearray(data)
    for _ in range(chance.choice((1, 1, 2, 3, 8))):
        reach = len(data) if chance.random() < 0.5 else max(1, len(data) // 5)
        place = chance.randrange(reach) if data else 0
        injure(data, place, chance)
    return bytes(data)


def injure(data, place, chance):
    kind = chance.randrange(8)
    length = chance.choice((1, 2, 4, 8, 64))
    if kind == 0 and data:
        data[place] ^= 1 << chance.randrange(8)
    elif kind == 1 and data:
        data[place] = chance.choice(INTERESTING)
    elif kind == 2:
        del data[place : place + length]
    elif kind == 3:
        data[place:place] = data[place : place + length]
    elif kind == 4:
        data[place : place + length] = chance.randbytes(length)
    elif kind == 5:
        del data[place:]
    elif kind == 6:
        value = chance.choice((0, 1, 2**31 - 1, 2**32 - 1, 2**63 - 1, 2**64 - 1))
        data[place : place + 8] = value.to_bytes(8, "little")
    else:
        other = chance.randrange(len(data) + 1)
        data[place : place + length] = data[other : other + length]


def fuzz(count, seed, folder):
    """Mutate and try `count` files; all of them lie in `folder` in turn."""
    chance, counts, canary = random.Random(seed), FuzzCounts(), folder / "canary"
    good = seeds(canary)
    while counts.files < count:
        passed = []
        for _ in range(min(BATCH, count - counts.files)):
            ending, data = chance.choice(good)
            file = folder / f"{counts.files % BATCH}{ending}"
            file.write_bytes(mutated(data, chance))
            source = LocalFolder(folder, "fuzz")  # a folder is listed once, and this one changes
            try_header(source, file, counts, passed)
            counts.files += 1
        try_values(passed, counts)
        if canary.exists():
            counts.failures.append("the canary was touched: code of a file ran")
            break
        for file in folder.iterdir():
            file.unlink()
        print(next(counts.lines()), file=sys.stderr, flush=True)
    return counts


def try_header(source, file, counts, passed):
    """The first wall and the layout; what both take is kept for the second."""
    started = process_time()  # a busy machine is no fault of the file
    try:
        header = read_header(source, file.name)
        heads = read_heads({file.name: header}, f"fuzz/{file.name}", whole=False)
        passed.append((file, header, heads))
    except ModelError as error:
        refuse(str(error), file, counts)
    except Exception as error:
        fail(f"{type(error).__name__}: {error}", file, counts)
    spent = process_time() - started
    counts.slowest = max(counts.slowest, spent)
    if spent > SLOW:
        fail(f"took {spent:.1f} s", file, counts)


def try_values(passed, counts):
    """What the child does with pickles, then what loading does with safetensors."""
    for file, header, heads in passed:
        made = file
        if file.suffix == ".pt":
            made = file.with_suffix(".out.safetensors")
            job = pickle_sandbox.job_of([file], [made], [header])
            if (problem := run_here(job)) is not None:
                refuse(problem, file, counts)
                continue
        build(made, heads, counts)


def build(file, heads, counts):
    """As loading does: the values, the module, what is finite."""
    try:
        with safe_open(file, framework="pt") as opened:
            tensors = {n: opened.get_tensor(inside) for n, (_, inside) in heads.tensors.items()}
        built = heads_of(tensors)
    except Exception as error:
        fail(f"{type(error).__name__}: {error}", file, counts)
        return
    if all(bool(torch.isfinite(p).all()) for p in built.parameters()):
        counts.taken += 1
        counts.kinds["taken"] += 1
    else:
        refuse("holds NaN or infinity", file, counts)


def refuse(line, file, counts):
    counts.refused += 1
    if "\n" in line or len(line) > 800:
        fail(f"not one short line: {line[:200]!r}", file, counts)
    counts.kinds[kind_of(line)] += 1


def kind_of(line):
    """A refusal without its numbers and names."""
    for word in KINDS:
        if word in line:
            return word
    return line[:60]


KINDS = (
    "overlaps another or leaves a gap", "not valid JSON", "not UTF-8", "unknown dtype",
    "cut short",
    "does not match its shape", "not described by", "no valid", "its tensors need", "duplicate",
    "asks to run", "does more than list tensors", "not contiguous", "larger than its data",
    "no data in the file", "compressed", "two with the same name", "exactly one data.pkl",
    "is not a tensor",
    "malformed", "unexpected tensor", "is incomplete", "cannot be used", "out of range", "is empty",
    "same part", "NaN or infinity", "torch cannot read it", "not a torch.save archive", "mixes",
    "larger than the file", "are allowed", "big-endian", "torch reads tensors", "not a JSON object",
)  # fmt: skip


def fail(what, file, counts):
    digest = hashlib.sha256(file.read_bytes() if file.exists() else b"").hexdigest()[:12]
    counts.failures.append(f"{file.name} ({digest}): {what}")


def main():
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000
    seed = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    started = monotonic()
    with tempfile.TemporaryDirectory() as folder:
        counts = fuzz(count, seed, Path(folder))
    print("\n".join(counts.lines()))
    print(f"seed {seed}, {monotonic() - started:.0f} s")
    return 1 if counts.failures else 0


if __name__ == "__main__":
    sys.exit(main())
