"""What the README and examples/ show works as it stands there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from functools import partial
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


def blocks_of(document: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", (ROOT / document).read_text(), re.MULTILINE | re.DOTALL)


def promised_by(program: str) -> list[str]:
    """What the comments behind its print statements say."""
    return re.findall(r"^ *print\(.*\) +# (.*)$", program, re.MULTILINE)


def test_the_document_of_actors_prints_what_it_says(tmp_path: Path) -> None:
    program = tmp_path / "actors.py"
    program.write_text("\n".join(blocks_of("docs/actors.md", "python")))
    lines = iter(output_of(program).splitlines())
    promised = promised_by(program.read_text())
    assert len(promised) > 20
    assert [text for text in promised if text not in lines] == []  # `in` goes on behind the line it has found


def test_the_worker_loops_of_the_document_of_actors(tmp_path: Path) -> None:
    """With files in place of hosts."""
    (shell,), (client,) = blocks_of("docs/actors.md", "sh"), blocks_of("docs/actors.md", "py")
    _, make_secret, run_loop = (re.sub(r"^python -c \"(.*)\"$", r"\1", line) for line in shell.splitlines())
    python = partial(subprocess.Popen, cwd=tmp_path, env={**os.environ, "MONARCH_RDMA_SECRET_FILE": "job.secret"})
    assert python([sys.executable, "-c", make_secret]).wait(30) == 0
    hosts = {f"tcp://node{n}:22222": f"ipc://{tmp_path}/{n}" for n in (1, 2)}
    loops = [python([sys.executable, "-c", run_loop.replace("tcp://node1:22222", file)]) for file in hosts.values()]
    try:
        for host, file in hosts.items():
            client = client.replace(host, file)
        shown = client.replace('"gpus": 8', '"gpus": 2') + "print(procs.extent)\n"
        with python([sys.executable, "-c", shown], stdout=subprocess.PIPE, text=True) as running:
            assert running.communicate(timeout=60) == ("{hosts: 2, gpus: 2}\n", None)
    finally:
        for loop in loops:
            loop.terminate()
    assert [loop.wait(30) for loop in loops] == [0, 0]


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
