"""Which compiler builds the C library, what is left of it, and what it does without."""

import shlex
import sys
from ctypes import CDLL, c_char_p

import pytest

from medusa_chat.checkpoints import native_build, native_trial

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


# Faults in what is written by hand for a CPU: what stands in the sources, and what is put there.
SUMS = {  # another factor, so that sums are others
    '"vpdpbusd %2, %1, %0"': '"vpdpbusd %1, %1, %0"',
    '"%{vex%} vpdpbusd %2, %1, %0"': '"%{vex%} vpdpbusd %1, %1, %0"',
    '"vpmaddubsw %2, %1, %0"': '"vpmaddubsw %1, %1, %0"',
    "vdotq_s32(s.sums[0], a.bytes[0], b.bytes[0])": "vdotq_s32(s.sums[0], a.bytes[0], a.bytes[0])",
}
TRAPS = {name: '"ud2"' for name in list(SUMS)[:3]} | {
    "vdotq_s32(s.sums[0], a.bytes[0], b.bytes[0])": "(__builtin_trap(), s.sums[0])"
}
# portable C too
ALWAYS = SUMS | {"sums += (w << (24 - i)": "sums -= (w << (24 - i)"}


def planted(faults, folder):
    """The sources that products need, with faults and with three types of blocks, so that they are
    compiled sooner."""
    folder.mkdir()
    for file in native_build.SOURCES.glob("*.[ch]"):
        if file.suffix == ".h" or file.stem in ("packed", "counted", "product", "tiles", "team"):
            text = file.read_text("utf-8")
            for right, wrong in faults.items():
                text = text.replace(right, wrong)
            kept = ("#define ALL", "    DO(3,", "    DO(14,", "    DO(39,")
            if file.name == "reading.h":
                lines = text.splitlines()
                text = "\n".join(
                    x for x in lines if not x.startswith("    DO(") or x.startswith(kept)
                )
            (folder / file.name).write_text(text + "\n", "utf-8")
    return folder


@pytest.mark.parametrize(("faults", "is_lost"), [(SUMS, False), (TRAPS, False), (ALWAYS, True)])
def test_portable_c_multiplies_where_instructions_are_wrong(
    faults, is_lost, library, tmp_path, monkeypatch, caplog
):
    """Whether they give other numbers or end the process; where all is wrong, torch goes on."""
    library.instructions.restype = c_char_p
    name = library.instructions(native_trial.PACKED).decode()
    if name == "portable C":
        pytest.skip("this CPU has no instructions of its own for it")
    quick = [flag for flag in native_build._flags() if flag != "-O2"]
    monkeypatch.setattr(native_build, "_flags", lambda: quick)
    monkeypatch.setattr(native_build, "SOURCES", planted(faults, tmp_path / "sources"))
    monkeypatch.setenv(native_build.PLACE, str(tmp_path / "native"))
    found = native_build.opened.__wrapped__(native_build.compiler())
    kept = list((tmp_path / "native").iterdir())
    if is_lost:
        assert found is None and not kept and "are wrong" in caplog.text
        return
    (file,) = kept
    c = CDLL(str(file))
    c.without.restype = c.instructions.restype = c_char_p
    assert c.without().decode() == name
    assert c.instructions(native_trial.PACKED) == b"portable C"
    assert native_trial.wrong_instructions(file) == []
