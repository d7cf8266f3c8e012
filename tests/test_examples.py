"""What the README and examples/ show works as it stands there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def output_of(program: Path) -> str:
    done = subprocess.run(
        [sys.executable, str(program)], capture_output=True, text=True, timeout=100, check=False, cwd=program.parent
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_the_readme_example(tmp_path: Path) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    program = tmp_path / "example.py"
    program.write_text(blocks[0])
    assert len([line for line in blocks[0].splitlines() if line.strip()]) <= 16
    assert "16777216.0" in output_of(program)


EXAMPLES: list[tuple[str, list[str]]] = [
    ("copy_weights", ["4 tensors, 33.6 MB", "the reader's model is now the owner's"]),
    ("ping_pong", ["the ball came back 2000 times"]),
    ("parameter_server", ["the loss fell from"]),
    ("weight_sync", ["the mean reward rose from"]),
    ("notify", [f"row {row:2} is complete" for row in range(16)]),
    ("share_model", ["134 MB of weights"]),
]


@pytest.mark.parametrize(("name", "told"), EXAMPLES)
def test_example(name: str, told: list[str]) -> None:
    out = output_of(ROOT / "examples" / f"{name}.py")
    assert [text for text in told if text not in out] == []


def test_every_example_is_run() -> None:
    assert {path.stem for path in (ROOT / "examples").glob("*.py")} == {name for name, _ in EXAMPLES}


def test_documents_name_files_that_exist() -> None:
    missing = []
    for document in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", document.read_text()):
            if not (document.parent / target).exists():
                missing.append(f"{document.name}: {target}")
    assert missing == []


def test_every_option_is_documented() -> None:
    from monarch_rdma import config

    text = (ROOT / "docs" / "architecture.md").read_text()
    assert [name for name in config.OPTIONS if f"`{name}`" not in text] == []
