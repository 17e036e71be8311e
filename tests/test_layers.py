"""Imports go downwards, in the order of docs/structure.md; names, folders and classes are as scripts/size counts."""

import ast
import subprocess
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

import tokenwright
from tests.scripts.test_scripts import script

PACKAGE = Path(tokenwright.__file__).parent
STRUCTURE = script("structure.py")

# From the bottom up. A room may import rooms of lower rows and itself; those of one row do not meet.
ROWS = (
    ("errors", "arrays", "importing", "regular_file"),
    ("checks",),
    ("units", "environment", "formats"),
    ("config", "text"),
    ("sampling_params",),
    ("engine",),
    ("cache", "decode", "pictures"),
    ("models",),
    ("backends",),
    ("checkpoints", "trace"),
    ("llm",),
    ("cluster",),
    ("planner",),
    ("bench", "explorer"),
    ("serve",),
    ("cli",),
)
HEIGHT = {room: height for height, row in enumerate(ROWS) for room in row}
TORCH = PACKAGE / "backends" / "torch"  # all of the package that may import torch
UNPICKLING = {"pickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve", "multiprocessing"}


@cache
def tree_of(path: Path) -> ast.Module:
    """A file, parsed once for all tests here."""
    return ast.parse(path.read_text(encoding="utf-8"))


def imports(nodes: Iterable[ast.AST]) -> Iterator[tuple[int, str]]:
    """Every module that imports among the nodes name, with its line."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative imports hide where they lead"
            if node.module == "tokenwright":
                yield from ((node.lineno, f"tokenwright.{alias.name}") for alias in node.names)
            else:
                yield node.lineno, node.module or ""


def violations(room: str, tree: ast.Module, *, with_torch: bool = False) -> list[str]:
    """What a file of `room` imports and must not: at the top, in functions and for type checking alike.

    with_torch: whether it is in the torch backend.
    """
    found = []
    for line, name in imports(ast.walk(tree)):
        parts = name.split(".")
        if parts[0] == "torch" and not with_torch:
            found.append(f"line {line}: {room} imports torch")
        if parts[0] in UNPICKLING:
            found.append(f"line {line}: {room} imports {parts[0]}, which can run code of what it reads")
        if parts[0] != "tokenwright" or len(parts) == 1:
            continue
        other = parts[1]
        if other in ("__version__", "__main__"):
            continue
        if other not in HEIGHT:
            found.append(f"line {line}: {room} imports {name}; name the room itself")
        elif other != room and HEIGHT[other] >= HEIGHT[room]:
            found.append(f"line {line}: {room} imports {other}")
        elif room == "text" and other not in ("text", "errors", "regular_file"):
            found.append(f"line {line}: text stands on errors and regular_file and imports {other}")
    return found


def files() -> list[tuple[str, Path]]:
    """The package's files by room; the two files at its very top are the door and belong to no room."""
    door = {PACKAGE / "__init__.py", PACKAGE / "__main__.py"}
    return [
        (path.relative_to(PACKAGE).parts[0].removesuffix(".py"), path)
        for path in sorted(PACKAGE.rglob("*.py"))
        if path not in door
    ]


def test_imports_go_downwards() -> None:
    found = [
        f"{path.relative_to(PACKAGE)}: {violation}"
        for room, path in files()
        for violation in violations(room, tree_of(path), with_torch=TORCH in path.parents)
    ]
    assert not found, "\n".join(found)


def test_every_room_has_its_row() -> None:
    assert {room for room, _ in files()} <= HEIGHT.keys()


@pytest.mark.parametrize(
    ("room", "source", "told"),
    [
        ("engine", "from tokenwright.models.cost import CostModel", "engine imports models"),
        ("engine", "import tokenwright.backends", "engine imports backends"),
        ("engine", "def late():\n    import torch", "line 2: engine imports torch"),
        ("engine", "from torch import Tensor", "engine imports torch"),
        ("engine", "from tokenwright import LLM", "name the room itself"),
        ("cache", "from tokenwright.decode.sampler import pick", "cache imports decode"),
        ("cache", "from tokenwright import backends", "cache imports backends"),
        ("cluster", "def late():\n    from pickle import loads", "line 2: cluster imports pickle"),
        ("text", "from tokenwright.config import EngineConfig", "text imports config"),
        ("models", "from tokenwright.llm.llm import LLM", "models imports llm"),
        (
            "config",
            "if TYPE_CHECKING:\n    from tokenwright.text import stream",
            "line 2: config imports text",
        ),
    ],
)
def test_a_planted_violation_is_found(room: str, source: str, told: str) -> None:
    [violation] = violations(room, ast.parse(source))
    assert told in violation


@pytest.mark.parametrize(
    ("room", "source"),
    [
        (
            "engine",
            "from tokenwright.config import EngineConfig\nfrom tokenwright.engine.page_pool import PagePool",
        ),
        ("llm", "import numpy\nfrom tokenwright.text.stream import TextStream"),
        ("cli", "from tokenwright import __version__\nimport tokenwright"),
        ("cache", "import numpy"),
    ],
)
def test_what_is_allowed_is_let_through(room: str, source: str) -> None:
    assert violations(room, ast.parse(source)) == []


def test_only_the_torch_backend_imports_torch() -> None:
    tree = ast.parse("def late():\n    import torch")
    assert violations("backends", tree) == ["line 2: backends imports torch"]
    assert violations("backends", tree, with_torch=True) == []
    assert any("import torch" in path.read_text(encoding="utf-8") for path in TORCH.glob("*.py"))


OPENERS = {"backends/device.py", "backends/runner.py"}
THERE = "tokenwright.backends.torch"


def loaded_with(path: Path) -> set[str]:
    """The modules that a file imports when it is loaded."""
    found = STRUCTURE.runtime_imports(tree_of(path).body)
    return {name for node in found for _, name in names_of(node)}


def names_of(node: ast.Import | ast.ImportFrom) -> Iterator[tuple[int, str]]:
    """The modules of one import; those of the torch backend by name, also where the folder is imported from."""
    for line, name in imports([node]):
        yield line, name
        if name == THERE and isinstance(node, ast.ImportFrom):
            yield from ((line, f"{THERE}.{alias.name}") for alias in node.names)


def test_few_files_open_what_loads_torch() -> None:
    """They do so in functions. Other files of the torch backend are over arrays as well, and load no torch."""
    each = {f"{THERE}.{path.stem}": loaded_with(path) for path in TORCH.glob("*.py")}
    heavy = {"torch"}
    while more := {name for name, found in each.items() if found & heavy} - heavy:
        heavy |= more
    assert f"{THERE}.border" in heavy
    assert f"{THERE}.decoder" not in heavy
    outside = {path: path.relative_to(PACKAGE).as_posix() for _, path in files() if TORCH not in path.parents}
    assert [name for path, name in outside.items() if loaded_with(path) & heavy] == []
    opened = {
        name
        for path, name in outside.items()
        for node in runtime_nodes(path)
        for _, module in names_of(node)
        if module in heavy
    }
    assert opened == OPENERS


def runtime_nodes(path: Path) -> Iterator[ast.Import | ast.ImportFrom]:
    """The imports of a file, in functions as well, but for those for types."""
    nodes = list(ast.walk(tree_of(path)))
    typed = {
        id(inner)
        for node in nodes
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }
    for node in nodes:
        if isinstance(node, ast.Import | ast.ImportFrom) and id(node) not in typed:
            yield node


def test_torch_is_not_loaded() -> None:
    rooms = ("errors", "config", "engine", "cli", "backends.runner", "llm.llm", "serve.app")
    lines = ["import sys", *(f"import tokenwright.{one}; print('{one}', 'torch' in sys.modules)" for one in rooms)]
    told = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=True).stdout
    assert told.splitlines() == [f"{one} False" for one in rooms]


def test_public_names_are_there_and_few() -> None:
    assert len(tokenwright.__all__) <= 14
    assert set(tokenwright.__all__) <= set(dir(tokenwright))
    for name in tokenwright.__all__:
        assert getattr(tokenwright, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        tokenwright.nothing  # noqa: B018


@pytest.fixture(scope="module")
def trees() -> dict[str, ast.Module]:
    return {path.relative_to(PACKAGE).as_posix(): tree_of(path) for path in sorted(PACKAGE.rglob("*.py"))}


def test_names_mean_one_thing(trees: dict[str, ast.Module]) -> None:
    assert STRUCTURE.class_names_twice(trees) == {}
    assert STRUCTURE.file_names_twice(trees) == {}


def test_rooms_are_small(trees: dict[str, ast.Module]) -> None:
    assert len(STRUCTURE.loose_modules(trees)) <= STRUCTURE.LOOSE
    assert [wide for wide in STRUCTURE.widths(trees) if wide[0] > STRUCTURE.WIDE] == []


def test_no_modules_import_each_other_when_they_are_loaded(trees: dict[str, ast.Module]) -> None:
    assert STRUCTURE.import_circles(trees) == []


def test_folders_are_small_everywhere() -> None:
    files = STRUCTURE.repository()
    assert {"src/tokenwright/llm/llm.py", "tests/test_layers.py", "web/src/main.tsx"} < set(files)
    assert STRUCTURE.crowded_folders(files) == {}
    assert STRUCTURE.left_over(files) == []


def test_what_is_left_over_is_found(tmp_path: Path) -> None:
    for name in ("src/a.py", "src/a.py.orig", "tests/node_modules/b.py", "web/c.css"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert STRUCTURE.repository(tmp_path) == ["src/a.py", "src/a.py.orig", "web/c.css"]
    assert STRUCTURE.left_over(STRUCTURE.repository(tmp_path)) == ["src/a.py.orig"]


# Classes that still extend a concrete one of another room. The list only shrinks: what several rooms must be able to
# do is a Protocol, and each has its parts.
EXTENDING = {
    "backends/native/ranks.py:SplitStore extends KVStore of cache",
    "backends/protocol.py:Scored extends Scoring of models",
    "serve/service/types.py:GenerationRequest extends ChatRequest of llm",
}


def extending(trees: dict[str, ast.Module]) -> set[str]:
    """The classes that extend a class of another room, but for Protocols and exceptions."""
    classes = {
        node.name: (path, node)
        for path, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    }

    def bases(node: ast.ClassDef) -> list[str]:
        each = [one.value if isinstance(one, ast.Subscript) else one for one in node.bases]
        return [ast.unparse(one).split(".")[-1] for one in each]

    def abstract(name: str) -> bool:
        if name not in classes:
            return name in ("Protocol", "ABC", "Exception", "BaseException")
        return any(map(abstract, bases(classes[name][1])))

    def room(path: str) -> str:
        return path.split("/")[0].removesuffix(".py")

    return {
        f"{path}:{name} extends {base} of {room(classes[base][0])}"
        for name, (path, node) in classes.items()
        for base in bases(node)
        if base in classes and room(classes[base][0]) != room(path) and not abstract(base)
    }


def test_no_class_extends_a_concrete_one_of_another_room(trees: dict[str, ast.Module]) -> None:
    assert extending(trees) == EXTENDING


def planted(**sources: str) -> dict[str, ast.Module]:
    """A package: sources by their paths, with __ for the slash."""
    return {f"{name.replace('__', '/')}.py": ast.parse(source) for name, source in sources.items()}


def test_planted_names_are_found() -> None:
    trees = planted(a__x="class One: ...", b__x="class One: ...", b__routes="", a__routes="")
    assert STRUCTURE.class_names_twice(trees) == {"One": ["a/x.py", "b/x.py"]}
    assert STRUCTURE.file_names_twice(trees) == {"x.py": ["a/x.py", "b/x.py"]}
    panels = planted(explorer__panels__race="", cli__commands__race="")
    assert STRUCTURE.file_names_twice(panels) == {}
    assert list(STRUCTURE.file_names_twice(panels | planted(bench__race=""))) == ["race.py"]


def test_a_planted_crowd_and_a_wide_class_are_found() -> None:
    assert STRUCTURE.crowded_folders(f"a/{at}.py" for at in range(19)) == {("a", ".py"): 19}
    names = "\n".join(f"        self.a{at} = {at}" for at in range(13))
    wide = f"class Wide:\n    def __init__(self):\n{names}"
    fields = "\n".join(f"    a{at}: int = {at}" for at in range(13))
    values = f"@dataclass(frozen=True)\nclass Values:\n{fields}\n    def total(self): ..."
    assert STRUCTURE.widths(planted(a=wide, b=values)) == [(13, "a.py:Wide")]


def test_a_class_that_extends_one_of_another_room_is_found() -> None:
    one = "class Port(Protocol): ...\nclass Refused(Exception): ...\nclass Engine: ..."
    two = "class Near(Port): ...\nclass Worse(Refused): ...\nclass Local(Engine): ...\nclass Own(Local): ..."
    assert extending(planted(a__x=one, b__y=two)) == {"b/y.py:Local extends Engine of a"}


def test_a_planted_circle_is_found_and_those_of_types_and_of_functions_are_not() -> None:
    one = "from tokenwright.b import two\nfrom tokenwright import c"
    two = "if TYPE_CHECKING:\n    import tokenwright.c\nelse:\n    from tokenwright.a import one"
    late = "def late():\n    import tokenwright.a"
    assert STRUCTURE.import_circles(planted(a=one, b=two, c=late)) == [["tokenwright.a", "tokenwright.b"]]


SECRET = {"secret", "mac", "proof", "password", "passphrase", "credential"}  # words of names; or "api" and "key"


def named_secret(node: ast.AST) -> bool:
    """Whether an expression's name tells of a secret: `self._secret`, `seal.mac(page)`, `body["api_key"]`, a slice."""
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
        name = str(node.slice.value)
    else:
        inner = node.func if isinstance(node, ast.Call) else node.value if isinstance(node, ast.Subscript) else node
        name = getattr(inner, "id", getattr(inner, "attr", ""))
        if name == "encode" and isinstance(inner, ast.Attribute):
            return named_secret(inner.value)
    words = set(name.lower().split("_"))
    return not name.isupper() and bool(words & SECRET or {"api", "key"} <= words)  # a constant is a size


def leaking(tree: ast.AST) -> Iterator[ast.Compare]:
    """Comparisons of secrets that end at the first byte that differs, and so tell by their time how many are right."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            equal = any(isinstance(one, (ast.Eq, ast.NotEq)) for one in node.ops)
            constant = any(isinstance(one, ast.Constant) for one in sides)
            if equal and not constant and any(map(named_secret, sides)):
                yield node


def test_secrets_are_compared_in_constant_time() -> None:
    found = [f"{path.relative_to(PACKAGE)}:{one.lineno}" for _, path in files() for one in leaking(tree_of(path))]
    assert not found, f"use hmac.compare_digest: {found}"


@pytest.mark.parametrize(
    "source",
    [
        "a.teacher.secret == b",
        "b != self._secret",
        "page[16:] == seal.mac(page)",
        "body['api_key'] == key",
        "given == secret.encode()",
        "mac[:8] == found",
    ],
)
def test_a_planted_comparison_is_found(source: str) -> None:
    assert list(leaking(ast.parse(source)))
    assert not list(leaking(ast.parse("len(found) != SECRET or key == proofs or secret is None or password == ''")))
