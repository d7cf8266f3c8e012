"""The arrows between layers, C++ and Python: who may include or import whom. docs/architecture.md draws them.

Each rule is a function from a source tree to a list of violations. It must find nothing in this project, and in a small
sound tree with one violation put into it exactly that.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# --- C++ ---------------------------------------------------------------------------------------------------------

LEVEL = {"base": 0, "memory": 1, "kernels": 2, "transport": 3, "collective": 4}
ENGINE_LEVEL, TOP_LEVEL = 5, 6
# What programs see of the core.
FACES = {"ops": {"engine.h", "kernels/kernels.h", "kernels/float_formats.h"}, "bench": {"engine.h"}}
FOREIGN = re.compile(r"^(torch|ATen|c10|pybind11|hip|rocm|hsa|cuda|nccl|rccl|Python\.h|cuda.*\.h|hip.*\.h)(/|$)")
VERBS_FILES = ("verbs", "verbs_lane", "queue_pair")
CONCRETE_LANES = ("tcp", "shm", "local", *VERBS_FILES)


def cpp_files(root: Path) -> list[Path]:
    return sorted(path for path in (root / "csrc").rglob("*") if path.suffix in (".h", ".cc"))


def includes(path: Path) -> Iterator[tuple[str, str]]:
    """Pairs of ('"' or '<', included name)."""
    for line in path.read_text().splitlines():
        if match := re.match(r'\s*#\s*include\s*(["<])([^">]+)[">]', line):
            yield match[1], match[2]


def own_includes(root: Path, path: Path) -> Iterator[Path]:
    """The project's files that `path` includes, relative to csrc/."""
    csrc = root / "csrc"
    for kind, name in includes(path):
        if kind == '"':
            places = [(path.parent / name).resolve(), (csrc / name).resolve()]
            found = next((place for place in places if place.exists()), places[0])
            yield found.relative_to(csrc.resolve()) if found.is_relative_to(csrc.resolve()) else Path(name)


def level(inside: Path) -> int:
    if inside == Path("engine.h"):
        return -1  # the shared words (kinds of failure, plain structs): it includes nothing of ours
    if inside.parent == Path() and inside.stem in ("engine", "engine_face", "engine_groups"):
        return ENGINE_LEVEL  # engine.h in terms of what is below
    return LEVEL.get(inside.parts[0], TOP_LEVEL)


def is_part_of(path: Path, names: tuple[str, ...]) -> bool:
    """tcp.cc and tcp_server.h are part of 'tcp'."""
    return any(path.stem == name or path.stem.startswith(name + "_") for name in names)


def upward_includes(root: Path) -> list[str]:
    found = []
    for path in cpp_files(root):
        inside = path.relative_to(root / "csrc")
        for target in own_includes(root, path):
            if level(inside) < TOP_LEVEL and level(target) > level(inside):
                found.append(f"csrc/{inside} includes {target}, which is above it")
    return found


def core_internals_at_the_top(root: Path) -> list[str]:
    """The torch ops and the benchmark use the core through its faces alone, as any other program would."""
    found = []
    for path in cpp_files(root):
        inside = path.relative_to(root / "csrc")
        if level(inside) == TOP_LEVEL:
            faces = FACES.get(inside.parts[0], {"engine.h"})
            for target in own_includes(root, path):
                if target.as_posix() not in faces and target.parts[0] != inside.parts[0]:
                    found.append(f"csrc/{inside} includes {target}; only {', '.join(sorted(faces))} is for it")
    return found


def foreign_includes(root: Path) -> list[str]:
    found = []
    for path in cpp_files(root):
        inside = path.relative_to(root / "csrc")
        for _, name in includes(path):
            if inside.parts[0] != "ops" and FOREIGN.match(name):
                found.append(f"csrc/{inside} includes {name}: torch, Python and GPU headers are for ops/ alone")
            if name.startswith("infiniband/") and inside != Path("transport/verbs.h"):
                found.append(f"csrc/{inside} includes {name}: only transport/verbs.h may")
    return found


def verbs_outside_its_files(root: Path) -> list[str]:
    found = []
    for path in cpp_files(root):
        inside = path.relative_to(root / "csrc")
        if not is_part_of(inside, VERBS_FILES):
            found += [
                f"csrc/{inside} includes {target}; only verbs_lane, queue_pair and verbs may"
                for target in own_includes(root, path)
                if target.name == "verbs.h"
            ]
    return found


def lanes_named_by_peer(root: Path) -> list[str]:
    found = []
    for path in cpp_files(root):
        inside = path.relative_to(root / "csrc")
        if inside.parts[0] == "transport" and is_part_of(inside, ("peer",)):
            found += [
                f"csrc/{inside} includes {target}: a peer knows lane.h, not the lanes"
                for target in own_includes(root, path)
                if is_part_of(target, CONCRETE_LANES)
            ]
    return found


# --- Python ------------------------------------------------------------------------------------------------------

NATIVE = {"_engine", "_C", "_kernels"}
# What each module or package may import of ours, besides itself. The longest matching name counts.
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "config": {"errors"},
    "rdma": {"errors", "config", "_engine", "_C"},
    "kernels": {"_kernels", "_C", "errors"},
    "sharding.layout": set(),
    "sharding.plan": set(),
    "sharding": {"errors", "config", "rdma"},
    "supervision.policy": {"errors"},
    "supervision.membership": {"errors"},
    "supervision": {"errors", "config", "rdma"},
    "collectives": {"errors", "config", "rdma", "kernels", "supervision.membership"},
    "actor.shape": {"errors"},
    "actor.value_mesh": {"errors", "actor.shape"},
    "actor": {"errors", "config", "rdma", "supervision"},
    "tools": {"errors", "config", "rdma", "actor", "supervision", "sharding"},
    "job": {"errors", "config", "rdma", "supervision", "actor"},
    "ft.simulate": {"progress"},
    "ft": {"errors", "config", "actor", "sharding", "collectives", "supervision", "rdma", "kernels"},
}
ONLY_FOR_THE_USER = {"cli", "tools", "job", "ft"}
USERS_OF_THE_BINDINGS = ("rdma", "doctor.software")  # the doctor says whether they can be loaded


def python_files(root: Path, *folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (root / folder).rglob("*.py"))


def module_name(root: Path, path: Path) -> str:
    """'rdma.buffer' for monarch_rdma/rdma/buffer.py, '' for monarch_rdma/__init__.py."""
    parts = list(path.relative_to(root / "monarch_rdma").with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def own_imports(root: Path, path: Path) -> Iterator[str]:
    """Names within monarch_rdma that `path` imports anywhere, also inside functions."""
    package = ["monarch_rdma", *module_name(root, path).split(".")]
    if path.name != "__init__.py":
        package = package[:-1]
    package = [part for part in package if part]
    for node in ast.walk(ast.parse(path.read_text())):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            base += node.module.split(".") if node.module else []
            # `from monarch_rdma import errors` names a module, `from monarch_rdma.errors import X` does not.
            names = [".".join([*base, alias.name]) for alias in node.names] if len(base) <= 1 else [".".join(base)]
        for name in names:
            if name.split(".")[0] == "monarch_rdma":
                yield name.removeprefix("monarch_rdma").removeprefix(".")


def covers(name: str, module: str) -> bool:
    return module == name or module.startswith(name + ".")


def is_own(root: Path, module: str) -> bool:
    """Whether it is a module of ours; anything else that the package's front page exports is not an arrow."""
    top = module.split(".")[0]
    return top in NATIVE or (root / "monarch_rdma" / top).is_dir() or (root / "monarch_rdma" / f"{top}.py").exists()


def imports_against_the_arrows(root: Path) -> list[str]:
    found = []
    for path in python_files(root, "monarch_rdma"):
        module = module_name(root, path)
        rule = max((name for name in MAY_IMPORT if covers(name, module)), key=len, default=None)
        for target in own_imports(root, path):
            if rule is None or not target or not is_own(root, target) or covers(rule, target):
                continue
            if not any(covers(allowed, target) for allowed in MAY_IMPORT[rule]):
                found.append(f"{module} imports {target}, which is not below it")
    return found


def imports_of_the_users_modules(root: Path) -> list[str]:
    found = []
    for path in python_files(root, "monarch_rdma"):
        module = module_name(root, path)
        for target in own_imports(root, path):
            top = target.split(".")[0]
            if top in ONLY_FOR_THE_USER and not covers(top, module) and module not in ("cli", "__main__"):
                found.append(f"{module} imports {target}, which is for the user alone")
    return found


def users_of_the_bindings(root: Path) -> list[str]:
    """cffi and what it made of engine.h: everything above rdma uses the classes of rdma."""
    found = []
    for path in python_files(root, "monarch_rdma"):
        module = module_name(root, path)
        if any(covers(allowed, module) for allowed in USERS_OF_THE_BINDINGS):
            continue
        targets = {target for target in own_imports(root, path) if covers("_engine", target)}
        found += [f"{module} imports {target}, which is for rdma alone" for target in sorted(targets)]
    return found


# config reads options from it; placement hands it on to the processes that are started.
USERS_OF_THE_ENVIRONMENT = ("config", "actor.launch.placement")


def readers_of_the_environment(root: Path) -> list[str]:
    found = []
    for path in python_files(root, "monarch_rdma"):
        if module_name(root, path) in USERS_OF_THE_ENVIRONMENT:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            named = isinstance(node, ast.Attribute) and node.attr in ("environ", "environb", "getenv")
            imported = isinstance(node, ast.ImportFrom) and node.module == "os"
            if named or (imported and any(alias.name in ("environ", "environb", "getenv") for alias in node.names)):
                found.append(f"{path.relative_to(root)}:{node.lineno} reads the environment; config.py does that")
    return found


def swallowed_exceptions(root: Path) -> list[str]:
    found = []
    for path in python_files(root, "monarch_rdma", "tests", "benchmarks", "examples"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ExceptHandler) and all(
                isinstance(line, ast.Pass) or (isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant))
                for line in node.body
            ):
                found.append(f"{path.relative_to(root)}:{node.lineno} swallows an exception")
    return found


# --- both --------------------------------------------------------------------------------------------------------

SHAPELESS = {"util", "utils", "common", "helper", "helpers", "manager", "misc"}


def shapeless_names(root: Path) -> list[str]:
    found = []
    for folder in ("csrc", "monarch_rdma", "hip_kernels", "hipify_rules", "tests", "benchmarks", "examples"):
        for path in sorted((root / folder).rglob("*")):
            if SHAPELESS & set(re.split(r"[^a-z]+", path.stem.lower())):
                found.append(f"{path.relative_to(root)}: the name does not say what is in it")
    return found


Rule = Callable[[Path], list[str]]
RULES: list[Rule] = [
    upward_includes,
    core_internals_at_the_top,
    foreign_includes,
    verbs_outside_its_files,
    lanes_named_by_peer,
    imports_against_the_arrows,
    imports_of_the_users_modules,
    users_of_the_bindings,
    readers_of_the_environment,
    swallowed_exceptions,
    shapeless_names,
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_project_keeps(rule: Rule) -> None:
    assert rule(ROOT) == []


def test_there_is_something_to_check() -> None:
    assert len(cpp_files(ROOT)) > 5
    assert len(python_files(ROOT, "monarch_rdma")) > 3
    assert any(list(own_includes(ROOT, path)) for path in cpp_files(ROOT))


VIOLATIONS: list[tuple[Rule, str, str, str]] = [
    (upward_includes, "csrc/base/loop.cc", '#include "../transport/peer.h"\n', "csrc/base/loop.cc includes transport/"),
    (upward_includes, "csrc/memory/region.cc", '#include "transport/peer.h"\n', "csrc/memory/region.cc includes"),
    (upward_includes, "csrc/engine.h", '#include "base/error.h"\n', "csrc/engine.h includes base/error.h"),
    (upward_includes, "csrc/kernels/a.cc", '#include "../transport/lane.h"\n', "csrc/kernels/a.cc includes transport/"),
    (core_internals_at_the_top, "csrc/ops/a.cc", '#include "../base/error.h"\n', "csrc/ops/a.cc includes base/error.h"),
    (core_internals_at_the_top, "csrc/ops/a.cc", '#include "../bench/b.h"\n', "csrc/ops/a.cc includes bench/b.h"),
    (core_internals_at_the_top, "csrc/bench/a.cc", '#include "../base/error.h"\n', "csrc/bench/a.cc includes base/"),
    (foreign_includes, "csrc/base/a.cc", "#include <torch/library.h>\n", "csrc/base/a.cc includes torch/"),
    (foreign_includes, "csrc/engine.cc", "  # include <Python.h>\n", "csrc/engine.cc includes Python.h"),
    (foreign_includes, "csrc/memory/device.cc", "#include <cuda_runtime.h>\n", "csrc/memory/device.cc includes cuda"),
    (foreign_includes, "csrc/memory/device.cc", "#include <hip/hip_runtime.h>\n", "csrc/memory/device.cc includes hip"),
    (
        foreign_includes,
        "csrc/transport/tcp.cc",
        "#include <infiniband/verbs.h>\n",
        "csrc/transport/tcp.cc includes",
    ),
    (verbs_outside_its_files, "csrc/transport/peer.cc", '#include "verbs.h"\n', "csrc/transport/peer.cc includes"),
    (lanes_named_by_peer, "csrc/transport/peer.cc", '#include "tcp.h"\n', "csrc/transport/peer.cc includes"),
    (lanes_named_by_peer, "csrc/transport/peer_link.cc", '#include "shm_map.h"\n', "csrc/transport/peer_link.cc"),
    (imports_against_the_arrows, "monarch_rdma/errors.py", "from . import config\n", "errors imports config"),
    (imports_against_the_arrows, "monarch_rdma/config.py", "import monarch_rdma.rdma\n", "config imports rdma"),
    (
        imports_against_the_arrows,
        "monarch_rdma/rdma/a.py",
        "def f():\n  from ..actor import x\n",
        "rdma.a imports actor",
    ),
    (imports_against_the_arrows, "monarch_rdma/rdma/a.py", "from monarch_rdma import actor\n", "rdma.a imports actor"),
    (imports_against_the_arrows, "monarch_rdma/sharding/plan.py", "from .layout import b\n", "sharding.plan imports"),
    (
        imports_against_the_arrows,
        "monarch_rdma/actor/shape.py",
        "from ..rdma import b\n",
        "actor.shape imports rdma",
    ),
    (imports_against_the_arrows, "monarch_rdma/actor/shape.py", "from . import proc\n", "actor.shape imports actor"),
    (
        imports_against_the_arrows,
        "monarch_rdma/actor/value_mesh.py",
        "from .proc import Proc\n",
        "actor.value_mesh imports actor.proc",
    ),
    (users_of_the_bindings, "monarch_rdma/demo.py", "from ._engine import lib\n", "demo imports _engine"),
    (users_of_the_bindings, "monarch_rdma/bench.py", "def f():\n  from . import _engine\n", "bench imports _engine"),
    (imports_of_the_users_modules, "monarch_rdma/rdma/a.py", "from .. import cli\n", "rdma.a imports cli"),
    (
        imports_of_the_users_modules,
        "monarch_rdma/actor/runtime/proc.py",
        "from ...tools import top\n",
        "proc imports tools",
    ),
    (imports_of_the_users_modules, "monarch_rdma/__init__.py", "import monarch_rdma.cli\n", " imports cli"),
    (readers_of_the_environment, "monarch_rdma/rdma/a.py", "import os\nx = os.environ['A']\n", "rdma/a.py:2 reads"),
    (readers_of_the_environment, "monarch_rdma/cli.py", "from os import getenv\n", "cli.py:1 reads"),
    (swallowed_exceptions, "tests/test_a.py", "try:\n  f()\nexcept OSError:\n  pass\n", "tests/test_a.py:3 swallows"),
    (swallowed_exceptions, "monarch_rdma/a.py", "try:\n  f()\nexcept OSError:\n  ...\n", "a.py:3 swallows"),
    (shapeless_names, "csrc/base/string_utils.cc", "", "csrc/base/string_utils.cc"),
    (shapeless_names, "monarch_rdma/common.py", "", "monarch_rdma/common.py"),
]


@pytest.mark.parametrize(("rule", "file", "text", "expected"), VIOLATIONS)
def test_a_violation_is_found(rule: Rule, file: str, text: str, expected: str, tmp_path: Path) -> None:
    sound = {
        "csrc/base/error.h": '#include "../engine.h"\n',
        "csrc/engine.h": "#include <stdint.h>\n",
        "csrc/memory/region.h": '#include "base/error.h"\n',
        "csrc/transport/lane.h": '#include "../memory/region.h"\n',
        "csrc/transport/peer.h": '#include "lane.h"\n',
        "csrc/transport/verbs.h": "#include <infiniband/verbs.h>\n",
        "csrc/transport/queue_pair.h": '#include "verbs.h"\n',
        "csrc/transport/tcp.h": '#include "lane.h"\n',
        "csrc/transport/shm_map.h": '#include "lane.h"\n',
        "csrc/engine.cc": '#include "engine.h"\n#include "transport/peer.h"\n',
        "csrc/kernels/kernels.h": '#include "../engine.h"\n',
        "csrc/ops/a.cc": '#include <torch/library.h>\n#include "engine.h"\n#include "../kernels/kernels.h"\n',
        "csrc/bench/a.cc": '#include "../engine.h"\n#include "b.h"\n',
        "csrc/bench/b.h": "",
        "monarch_rdma/__init__.py": "from .errors import PeerLost\n",
        "monarch_rdma/errors.py": "class PeerLost(Exception): ...\n",
        "monarch_rdma/config.py": "import os\nx = os.environ.get('A')\n",
        "monarch_rdma/actor/__init__.py": "from .proc import x\n",
        "monarch_rdma/actor/runtime/proc.py": "from monarch_rdma.rdma import a\nfrom . import shape\n",
        "monarch_rdma/actor/shape.py": "from ..errors import PeerLost\n",
        "monarch_rdma/actor/value_mesh.py": "from ..errors import PeerLost\nfrom .shape import x\n",
        "monarch_rdma/tools/top.py": "from ..actor import proc\n",
        "monarch_rdma/cli.py": "from . import rdma, errors, tools\n",
        "monarch_rdma/rdma/__init__.py": "from ..errors import PeerLost\nfrom .a import x\n",
        "monarch_rdma/rdma/a.py": "from .. import config\nfrom monarch_rdma import _engine\nx = 1\n",
        "monarch_rdma/sharding/layout.py": "",
        "tests/test_a.py": "try:\n  f()\nexcept OSError:\n  raise\n",
    }
    for name, content in sound.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    assert [found for each in RULES for found in each(tmp_path)] == []

    (tmp_path / file).write_text(text)
    found = rule(tmp_path)
    assert len(found) == 1
    assert expected in found[0]
