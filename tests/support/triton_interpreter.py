"""Triton's interpreter beside the NumPy that we have: Triton 3.6 reads the bounds of a loop in a
way that NumPy 2.4 refuses. Imported by the child processes in which kernels are interpreted."""

from typing import Any

from triton.runtime import interpreter

_patch = interpreter._patch_lang_tensor


def _patch_and_mend(tensor: Any, scope: Any) -> None:
    _patch(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


interpreter._patch_lang_tensor = _patch_and_mend
