"""The scripts: when kernels are checked and the package is installed anew, spills, and which words are counted."""

import importlib.machinery
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"


def script(name: str) -> ModuleType:
    """A script as a module."""
    loader = importlib.machinery.SourceFileLoader(f"script_{name}", str(SCRIPTS / name))
    spec = importlib.util.spec_from_file_location(loader.name, SCRIPTS / name, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def _scripts_on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(SCRIPTS)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)


def git(folder: Path, *arguments: str) -> None:
    who = ("-c", "user.name=tester", "-c", "user.email=tester@example.org")
    subprocess.run(["git", *who, *arguments], cwd=folder, check=True, capture_output=True)


def commit(folder: Path, file: str) -> None:
    (folder / file).parent.mkdir(exist_ok=True)
    with (folder / file).open("a") as out:
        out.write("a line\n")
    git(folder, "add", ".")
    git(folder, "commit", "-m", f"change {file}")


def test_kernels_are_checked_where_the_last_commit_or_the_tree_changed_them(tmp_path: Path) -> None:
    differs = script("common.py").differs_from_last_commit
    kernels = tmp_path / "native"
    assert differs(kernels, root=tmp_path), "no repository: nothing to compare with"
    git(tmp_path, "init", "-q")
    commit(tmp_path, "native/a.cpp")
    assert differs(kernels, root=tmp_path), "a first commit, or a shallow clone"
    commit(tmp_path, "other/b.py")
    assert not differs(kernels, root=tmp_path)
    commit(tmp_path, "native/a.cpp")
    assert differs(kernels, root=tmp_path)
    commit(tmp_path, "other/b.py")
    (kernels / "a.cpp").write_text("not yet committed\n")
    assert differs(kernels, root=tmp_path)
    assert differs(tmp_path / "other", kernels, root=tmp_path)


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script, for a project of two modules and a kernel in `tmp_path`."""
    made = script("install")
    for file in (*made.DECIDES, "src/tokenwright/a.py", "src/tokenwright/room/b.py", "src/native/k.cpp"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(file)
    monkeypatch.setattr(made.page, "sources", lambda: iter(()))
    for name, path in (("ROOT", ""), ("PACKAGE", "src/tokenwright"), ("NATIVE", "src/native")):
        monkeypatch.setattr(made, name, tmp_path / path)
    return made


@pytest.mark.parametrize(
    "change",
    [
        lambda root: (root / "src/native/k.cpp").write_text("another kernel"),
        lambda root: (root / "pyproject.toml").write_text("another version"),
        lambda root: (root / "src/tokenwright/a.py").rename(root / "src/tokenwright/room/a.py"),
        lambda root: (root / "src/tokenwright/room/b.py").unlink(),
        lambda root: (root / "src/tokenwright/room/c.py").touch(),
    ],
    ids=["a kernel", "a version", "a moved module", "a module less", "a module more"],
)
def test_it_is_installed_anew_when(change: Callable[[Path], object], install: ModuleType, tmp_path: Path) -> None:
    before = install.digest()
    change(tmp_path)
    assert install.digest() != before


def test_the_code_of_a_module_needs_no_new_installation(install: ModuleType, tmp_path: Path) -> None:
    before = install.digest()
    (tmp_path / "src/tokenwright/a.py").write_text("other code")
    assert install.digest() == before


@pytest.mark.parametrize("name", ["tokenwright", "tokenwright_engine"])
def test_the_distribution_of_the_former_name_is_removed(
    name: str, install: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lib" / "python3.11" / "site-packages" / f"{name}-0.1.0.dist-info").mkdir(parents=True)
    ran: list[tuple[object, ...]] = []
    monkeypatch.setattr(install, "VENV", tmp_path)
    monkeypatch.setattr(install, "must", lambda *command: ran.append(command))
    install.remove_former_name()
    assert [command[-1] for command in ran] == (["tokenwright"] if name == "tokenwright" else [])


@pytest.mark.parametrize("fails", [False, True])
def test_kernels_that_change_while_they_are_compiled_are_compiled_again(
    fails: bool, install: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An object file that was made meanwhile is newer than the source, though of the old one."""
    kernel = tmp_path / "src/native/k.cpp"
    monkeypatch.setattr(install, "STAMPS", {"test": tmp_path / "stamp"})

    def pip_install_for_tests() -> None:
        kernel.write_text("another kernel")
        os.utime(kernel, (1, 1))  # long before the object file
        if fails:
            sys.exit("a kernel does not compile")

    with pytest.raises(SystemExit, match="does not compile" if fails else "changed during the installation"):
        install.install_editable("test", "", pip_install_for_tests)
    assert kernel.stat().st_mtime > 1
    assert not (tmp_path / "stamp").exists()


WORDY = '''"""What a module begins with.

Whoever reads on: only the first line counts.
"""

class Public:
    """A pool. Of its pages none is free."""

    def method(self) -> None:
        """Those of a text; it tells of itself, so many, alone, to who waits."""

    def _private(self) -> None:
        """What nobody sees."""

def plain() -> None:
    """The client who waits for a page; `alone` is a name. What is it? It stays."""
'''


def test_words_are_counted_in_first_lines_and_public_docstrings(tmp_path: Path) -> None:
    module = tmp_path / "wordy.py"
    module.write_text(WORDY)
    found = [(line, form.partition(":")[0]) for _, line, form in script("style").of_module(module)]
    assert [line for line, _ in found] == [1, 6, *[9] * 5]
    assert len({form for _, form in found}) == len(found)


def test_words_are_read_in_docstrings_comments_and_messages(tmp_path: Path) -> None:
    style, module, page = script("style"), tmp_path / "wordy.py", tmp_path / "wordy.ts"
    module.write_text(WORDY + "\n\ndef _two() -> None:\n    # whoever reads\n    raise ValueError(f'{1} is alone')\n")
    found = [(line, form) for line, text in style.words(module) for form in style.forms(text)]
    assert sorted({line for line, _ in found}) == [1, 6, 9, 12, 20, 21]
    page.write_text('// What a page\n// shows.\nconst a = "so many"; // alone\n')
    assert [line for line, text in style.comments(page) for _ in style.forms(text)] == [1, 3]


def test_a_folder_with_more_places_than_are_left_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    style = script("style")
    monkeypatch.setattr(style, "LEFT", {"src": 10_000, "tests": 0})
    assert list(style.beyond("src")) == []
    assert len(list(style.beyond("tests"))) == 1


def test_the_docstrings_are_plain_english() -> None:
    style = script("style")
    assert [f"{path.name}:{line}: {wrong}" for path, line, wrong in style.places("src")] == []


HEADERS = {"whole.h": "#pragma once\n#include <cstdint>\nint64_t one();\n", "part.h": "int64_t two();\n"}


@pytest.mark.skipif(not shutil.which("c++"), reason="no C++ compiler")
def test_a_header_that_needs_another_does_not_compile_alone(tmp_path: Path) -> None:
    command = ["c++", f"-I{tmp_path}", "-o", "one.o", "-c", "one.cpp"]
    for name, text in HEADERS.items():
        (tmp_path / name).write_text(text)
    cpp = script("cpp")
    assert cpp.alone(tmp_path / "whole.h", command, "") == ""
    assert "int64_t" in cpp.alone(tmp_path / "part.h", command, "")


def test_long_sentences_are_counted_in_prose_only(tmp_path: Path) -> None:
    page, words = tmp_path / "page.md", " word" * 30
    page.write_text(
        f"One{words}. Two{words}.\n\n- A{words}\n- b{words}\n\n```\n{words}{words}\n```\n\nA{words}\n{words}.\n"
    )
    assert [(line, wrong[:22]) for _, line, wrong in script("style").of_page(page)] == [(10, "a sentence of 61 words")]


def test_the_documents_have_short_sentences() -> None:
    style = script("style")
    assert [f"{path.name}:{line}: {wrong}" for path, line, wrong in style.places("docs")] == []


def loop(*body: str, start: int = 16) -> str:
    """The disassembly of a loop over eight products and some more instructions."""
    texts = ["vfmadd231ps %ymm1,%ymm0,%ymm2"] * 8 + list(body)
    lines = [f"{start + at:8x}:\t{text}" for at, text in enumerate([*texts, f"jne    {start:x} <kernel+0x10>"])]
    return "\n".join(lines)


SPILLS = ["vmovaps %ymm2,0x40(%rsp)"] * 11


def test_accesses_to_the_stack_in_inner_loops_are_counted() -> None:
    registers = script("registers")
    text = "0000 <tw::avx2::kernel(int)>:\n" + loop("vmovaps 0x20(%rbp),%ymm3", "mov 0x8(%rsp),%rax")
    assert registers.loops(text) == [registers.Loop("tw::avx2::kernel(int)", 8, 1)]
    around = "0000 <kernel>:\n       1:\tvmovaps %ymm2,0x40(%rsp)\n" + loop() + "\n      ff:\tjne    1 <kernel+0x1>"
    assert registers.loops(around) == [registers.Loop("kernel", 8, 0)]  # not those of a loop around it
    assert registers.loops("0000 <tw::avx2::gated(int)>:\n" + loop(*SPILLS)) == []
    arm = "0000 <kernel>:\n" + loop("ldr q3, [sp, #16]", "fmla v0.4s, v1.4s, v2.4s").replace("jne ", "b.ne")
    assert registers.loops(arm) == [registers.Loop("kernel", 9, 1)]


def test_a_loop_that_spills_is_told_and_so_are_many_that_spill_a_little() -> None:
    registers = script("registers")
    clean = registers.Loop("clean", 1000, 0)
    [bad] = registers.loops("0000 <void tw::avx2::kernel<4>(int)>:\n" + loop(*SPILLS))
    told = ["11 accesses to the stack for 8 products in tw::avx2::kernel<4>"]
    assert registers.excesses("avx2", [clean, bad]) == told
    assert registers.excesses("avx2", [registers.Loop("some", 100, 20)]) == []
    assert registers.excesses("avx2", [registers.Loop("some", 100, 40)]) == [
        "40 accesses to the stack for 100 products in all inner loops"
    ]


def test_a_pages_package_has_what_its_modules_read() -> None:
    """A module reads a table of data beside it, of its own name."""
    files = dict(script("site").package_files())
    readers = [name for name, text in files.items() if name.endswith(".py") and b"__file__).with_suffix(" in text]
    assert len(readers) > 3
    for name in readers:
        stem = name.removesuffix(".py")
        assert f"{stem}.json" in files or f"{stem}.txt" in files, name
