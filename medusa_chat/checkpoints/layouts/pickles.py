"""Pickles: lists the tensors in a pickle without running it.

A pickle is a program. The few operations that a dict of tensors needs are interpreted here on plain
values; a program with any other operation is refused. Nothing is imported or called.
"""

import pickletools
from dataclasses import dataclass
from typing import Any

MAX_OPERATIONS = 1_000_000
STORAGES = {
    "torch DoubleStorage": "F64",
    "torch FloatStorage": "F32",
    "torch HalfStorage": "F16",
    "torch BFloat16Storage": "BF16",
    "torch LongStorage": "I64",
    "torch IntStorage": "I32",
    "torch ShortStorage": "I16",
    "torch CharStorage": "I8",
    "torch ByteStorage": "U8",
    "torch BoolStorage": "BOOL",
    "torch.storage UntypedStorage": "U8",
}
DTYPES = {
    "torch float8_e4m3fn": "F8_E4M3",
    "torch float8_e5m2": "F8_E5M2",
    "torch float8_e8m0fnu": "F8_E8M0",
    "torch uint16": "U16",
    "torch uint32": "U32",
    "torch uint64": "U64",
}
DICT = "collections OrderedDict"
TENSOR = ("torch._utils _rebuild_tensor_v2", "torch._utils _rebuild_tensor_v3")
PARAMETER = "torch._utils _rebuild_parameter"
ALLOWED = {DICT, *TENSOR, PARAMETER, *STORAGES, *DTYPES}
PLAIN = {
    *("BININT", "BININT1", "BININT2", "LONG1", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"),
    "BINFLOAT",
}
CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
MARK = object()


class Refusal(Exception):
    """Why a file is refused, as the end of a sentence."""


@dataclass(frozen=True)
class Name:
    """A class or function that the pickle names; it is never looked up."""

    full: str


@dataclass(frozen=True)
class Storage:
    dtype: str
    key: str


def tensors_of(program: bytes) -> dict[str, tuple[Any, ...]]:
    """Name -> (storage, offset, shape, strides, dtype or None), unchecked. Raises Refusal, and for
    a broken program whatever Python raises."""
    value = _Machine().run(program)
    if not isinstance(value, dict):
        raise Refusal(f"it holds a {type(value).__name__}, not a dict of tensors")
    for name, tensor in value.items():
        if not isinstance(name, str) or not isinstance(tensor, tuple):
            raise Refusal(f"{str(name)[:80]!r} is not a tensor: only named tensors are allowed")
    return value


class _Machine:
    """Interprets the operations of a pickle of tensors on plain values. Raises Refusal for any
    other operation, and for a broken program whatever Python raises."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def run(self, program: bytes) -> Any:
        for count, (code, argument, _) in enumerate(pickletools.genops(program)):
            if count > MAX_OPERATIONS:
                raise Refusal("its pickle is too long for a list of tensors")
            if code.name == "STOP":
                break
            self._step(code.name, argument)
        return self.stack.pop()

    def _step(self, name: str, argument: Any) -> None:
        stack = self.stack
        if name in ("PROTO", "FRAME"):
            return
        if name in PLAIN:
            stack.append(argument)
        elif name in CONSTANTS:
            stack.append(CONSTANTS[name])
        elif name in ("BINPUT", "LONG_BINPUT"):
            self.memo[argument] = stack[-1]
        elif name == "MEMOIZE":
            self.memo[len(self.memo)] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(self.memo[argument])
        elif name == "MARK":
            stack.append(MARK)
        elif name in ("EMPTY_TUPLE", "EMPTY_DICT", "EMPTY_LIST"):
            stack.append({"EMPTY_TUPLE": tuple, "EMPTY_DICT": dict, "EMPTY_LIST": list}[name]())
        else:
            self._gather(name, argument)

    def _gather(self, name: str, argument: Any) -> None:
        """The operations that combine several values."""
        stack = self.stack
        if name in ("TUPLE1", "TUPLE2", "TUPLE3"):
            stack.append(tuple(self._pop(int(name[-1]))))
        elif name == "TUPLE":
            stack.append(tuple(self._pop_to_mark()))
        elif name in ("APPEND", "APPENDS"):
            items = self._pop(1) if name == "APPEND" else self._pop_to_mark()
            _expect(stack[-1], list).extend(items)
        elif name in ("SETITEM", "SETITEMS"):
            items = self._pop(2) if name == "SETITEM" else self._pop_to_mark()
            _expect(stack[-1], dict).update(zip(items[::2], items[1::2], strict=True))
        elif name == "BUILD":
            _expect(stack.pop(), dict)  # state_dict() adds the versions of its modules
            _expect(stack[-1], dict)
        elif name == "BINPERSID":
            stack.append(_storage(stack.pop()))
        elif name == "GLOBAL":
            stack.append(_name(argument))
        elif name == "STACK_GLOBAL":
            stack.append(_name(" ".join(map(str, self._pop(2)))))
        elif name == "REDUCE":
            called, arguments = self._pop(2)
            stack.append(_reduced(called, arguments))
        else:
            raise Refusal(f"its pickle does more than list tensors ({name})")

    def _pop(self, count: int) -> list[Any]:
        items = [self.stack.pop() for _ in range(count)]
        return items[::-1]

    def _pop_to_mark(self) -> list[Any]:
        items = []
        while (item := self.stack.pop()) is not MARK:
            items.append(item)
        return items[::-1]


def _expect(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        name = type(value).__name__
        raise Refusal(f"its pickle does more than list tensors (it changes a {name})")
    return value


def _name(full: str) -> Name:
    if full not in ALLOWED:
        raise Refusal(f"it asks to run {full[:80]!r}, and only tensors are read")
    return Name(full)


def _storage(identity: Any) -> Storage:
    kind, named, key, _device, _count = identity
    if kind != "storage" or not isinstance(named, Name) or not isinstance(key, str):
        raise Refusal("its pickle does more than list tensors (unknown storage)")
    return Storage(STORAGES[named.full], key)


def _reduced(called: Any, arguments: tuple[Any, ...]) -> Any:
    """The result of a call: a dict, or a tensor as (storage, offset, shape, strides, dtype)."""
    if not isinstance(called, Name):
        raise Refusal("its pickle calls something that is not a function")
    if called.full == DICT and arguments == ():
        return {}
    if called.full == PARAMETER:
        return _expect(arguments[0], tuple)
    if called.full == TENSOR[0]:
        return (*arguments[:4], None)
    if called.full == TENSOR[1]:
        return (*arguments[:4], DTYPES[arguments[6].full])
    raise Refusal(f"its pickle calls {called.full} in a way that no tensor needs")
