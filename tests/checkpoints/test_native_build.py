"""Which compiler builds the C library, and what is left of it."""

import shlex
import sys

import pytest

from medusa_chat.checkpoints import native_build

ZIG = [sys.executable, "-P", "-m", "ziglang", "cc"]


@pytest.mark.parametrize(
    ("system", "there", "has_zig", "expected"),
    [
        ("linux", ("cc", "gcc"), True, ["/bin/cc"]),
        ("linux", ("clang",), False, ["/bin/clang"]),
        ("linux", (), True, ZIG),
        ("darwin", (), False, None),
        ("win32", ("gcc", "clang"), True, ZIG),
        ("win32", ("gcc", "clang"), False, None),
    ],
)
def test_zig_compiles_where_there_is_no_other_and_on_windows(
    system, there, has_zig, expected, monkeypatch
):
    """What is called gcc on Windows may have no threads, and clang no library."""
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(sys, "platform", system)
    found = {name: f"/bin/{name}" for name in there}
    monkeypatch.setattr(native_build.shutil, "which", found.get)
    monkeypatch.setattr(native_build, "find_spec", lambda name: has_zig and name == "ziglang")
    assert native_build.compiler() == expected
    monkeypatch.setenv("CC", "gcc -m32")
    assert native_build.compiler() == (["/bin/gcc", "-m32"] if "gcc" in there else None)
    monkeypatch.setenv(native_build.PLACE, "0")
    assert native_build.compiler() is None


def test_nothing_that_a_compiler_keeps_for_itself_stays(library, tmp_path, monkeypatch):
    """zig keeps 50 MB for later."""
    script = tmp_path / "compiler"
    script.write_text(
        "#!/bin/sh\nfor one in GLOBAL LOCAL; do\n"
        'eval folder=\\$ZIG_${one}_CACHE_DIR; touch "$folder/$one"\ndone\n'
        f'exec {shlex.join(native_build.compiler())} "$@"\n'
    )
    script.chmod(0o700)
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "one.c").write_text("int one(void) { return 1; }")
    monkeypatch.setattr(native_build, "SOURCES", tmp_path / "source")
    native_build._compile([str(script)], tmp_path / "native" / "one.so")
    assert [file.name for file in (tmp_path / "native").iterdir()] == ["one.so"]
