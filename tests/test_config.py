"""Options: one table, equal to what the core has; nothing unknown or unusable is accepted."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from monarch_rdma._engine import ffi, lib

import monarch_rdma
from monarch_rdma import config, errors
from monarch_rdma.config import OPTIONS, configure, configured
from monarch_rdma.rdma import Engine, Secret, default_engine
from monarch_rdma.rdma.secret import configured_secret

ENGINE_OPTIONS = {name: option for name, option in OPTIONS.items() if option.engine}


def test_the_table_is_the_cores_struct() -> None:
    fields = {name for name, _ in ffi.typeof("mr_options").fields} - {"secret", "secret_len"}
    assert set(ENGINE_OPTIONS) == fields


def test_defaults_are_the_cores() -> None:
    raw = ffi.new("mr_options *")
    lib.mr_options_default(raw)
    for name, option in ENGINE_OPTIONS.items():
        value = getattr(raw, name)
        assert option.default == (ffi.string(value).decode() if option.type is str else value), name


def test_every_option_is_documented() -> None:
    for option in OPTIONS.values():
        assert option.doc.endswith(".")
        assert option.check(option.default, option.name) == option.default
        assert option.env == "MONARCH_RDMA_" + option.name.upper()


def test_argument_over_configure_over_environment_over_default(monkeypatch: pytest.MonkeyPatch) -> None:
    assert config.get("tcp_sockets") == 4
    monkeypatch.setenv("MONARCH_RDMA_TCP_SOCKETS", "5")
    assert config.get("tcp_sockets") == 5
    configure(tcp_sockets=6)
    assert config.get("tcp_sockets") == 6
    assert config.engine_options(tcp_sockets=7)["tcp_sockets"] == 7
    assert config.get_runtime_config() == {"tcp_sockets": 6}
    config.clear_runtime_config()
    assert config.get_global_config()["tcp_sockets"] == 5


def test_configured_ends_with_its_block() -> None:
    configure(name="before")
    with configured(name="within", ip_family=4) as options:
        assert options["name"] == "within"
        with pytest.raises(errors.ConfigError), configured(name="inner"):
            config.get("nothing")
        assert config.get("name") == "within"
    assert (config.get("name"), config.get("ip_family")) == ("before", 0)


def test_all_or_nothing() -> None:
    with pytest.raises(errors.ConfigError):
        configure(tcp_sockets=2, copy_threads="many")
    assert config.get_runtime_config() == {}


@pytest.mark.parametrize(
    "call", [lambda: configure(tcp_socket=2), lambda: Engine(tcp_socket=2), lambda: config.get("tcp_socket")]
)
def test_an_unknown_option_is_told_the_nearest(call: Any) -> None:
    with pytest.raises(errors.ConfigError, match=r"'tcp_socket'.*'tcp_sockets'"):
        call()


def test_an_unknown_environment_variable_is_told_the_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MONARCH_RDMA_TCP_SOCKET", "2")
    with pytest.raises(errors.ConfigError, match=r"MONARCH_RDMA_TCP_SOCKET .*MONARCH_RDMA_TCP_SOCKETS"):
        Engine()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tcp_sockets", "many"), ("tcp_sockets", 0), ("tcp_sockets", 65), ("tcp_sockets", 2.5), ("tcp_sockets", True),
        ("tcp_sockets", None), ("tcp_sockets", "4KiB"), ("bulk_tls", 2), ("bulk_tls", "maybe"), ("lanes", ""),
        ("lanes", "tcp,tcp"),
        ("lanes", "smoke"), ("lanes", 5), ("ip_family", 5), ("port_max", 65536), ("heartbeat_timeout", "soon"),
        ("heartbeat_timeout", -1), ("heartbeat_timeout", float("nan")), ("heartbeat_timeout", float("inf")),
        ("name", 7), ("name", "a\0b"), ("name", "\ud800"), ("connect_timeout", 10**400), ("tcp_sockets", 10**400),
        ("max_frame_bytes", "1.5"), ("max_frame_bytes", 1),
    ],
)  # fmt: skip
def test_an_unusable_value_is_named(name: str, value: object) -> None:
    with pytest.raises(errors.ConfigError, match=rf"option {name} is {re.escape(repr(value))}, but must be"):
        configure(**{name: value})


def test_an_unusable_value_of_the_environment_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MONARCH_RDMA_TCP_SOCKETS", "many")
    with pytest.raises(errors.ConfigError, match="environment variable MONARCH_RDMA_TCP_SOCKETS is 'many'"):
        Engine()


@pytest.mark.parametrize(
    ("name", "value", "means"),
    [
        ("bulk_tls", "yes", True), ("bulk_tls", " Off ", False), ("tcp_sockets", "8", 8),
        ("max_frame_bytes", "1MiB", 1 << 20),
        ("max_frame_bytes", "0.5 MB", 500_000), ("heartbeat_timeout", "30s", 30.0),
        ("heartbeat_timeout", "250ms", 0.25),
        ("heartbeat_timeout", "2m", 120.0), ("heartbeat_timeout", 3, 3.0), ("lanes", ["tcp", "shm"], "tcp,shm"),
        ("lanes", " shm , tcp ", "shm,tcp"), ("secret_file", Path("/x"), "/x"),
    ],
)  # fmt: skip
def test_values_as_people_write_them(name: str, value: object, means: object) -> None:
    configure(**{name: value})
    assert config.get(name) == means


def test_the_core_checks_what_one_option_cannot_tell() -> None:
    with pytest.raises(errors.ConfigError, match="heartbeat_timeout"):
        Engine(heartbeat_interval=2, heartbeat_timeout=1)
    with pytest.raises(errors.ConfigError, match="port_min"):
        Engine(port_min=5000, port_max=4000)


def test_names_of_monarch(monkeypatch: pytest.MonkeyPatch) -> None:
    configure(rdma_allow_tcp_fallback=False)
    assert config.get("lanes") == "shm,verbs"
    configure(
        rdma_allow_tcp_fallback=True, rdma_disable_ibverbs=True, rdma_tcp_fallback_parallelism=2, bulk_security="tls"
    )
    assert (config.get("lanes"), config.get("tcp_sockets"), config.get("bulk_tls")) == ("shm,tcp", 2, True)
    config.clear_runtime_config()
    monkeypatch.setenv("MONARCH_RDMA_ALLOW_TCP_FALLBACK", "0")
    assert config.get("lanes") == "shm,verbs"
    with pytest.raises(errors.ConfigError, match=r"lanes .set through rdma_allow_tcp_fallback"):
        configure(lanes="tcp", rdma_allow_tcp_fallback=False)
    with pytest.raises(errors.ConfigError, match="rdma_allow_tcp_fallback is 'perhaps'"):
        configure(rdma_allow_tcp_fallback="perhaps")


def test_options_of_the_process_are_not_those_of_one_engine() -> None:
    with pytest.raises(errors.ConfigError, match="configure"):
        Engine(secret_file="/x")


def test_the_default_engine_refuses_options_that_come_too_late() -> None:
    default_engine().close()
    engine = default_engine()
    configure(tcp_sockets=3)
    with pytest.raises(errors.ConfigError, match=r"tcp_sockets is 3 now, but .* created with 4"):
        default_engine()
    engine.close()
    assert default_engine().options["tcp_sockets"] == 3
    default_engine().close()


def test_the_environment_is_read_in_one_place() -> None:
    package = Path(monarch_rdma.__file__).resolve().parent
    readers = [
        path.name
        for path in [*package.glob("rdma/*.py"), *package.glob("*.py")]
        if re.search(r"os\.environ|getenv", path.read_text())
    ]
    assert "config.py" in readers
    assert not set(readers) & {path.name for path in package.glob("rdma/*.py")}


def test_importing_loads_no_torch_and_no_asyncio() -> None:
    code = "import sys, monarch_rdma.rdma; print(*[m for m in ('torch', 'numpy', 'asyncio') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def test_submodules_come_by_themselves() -> None:
    code = "import monarch_rdma as m; m.rdma.RDMABuffer; m.config.configure; m.errors.PeerLost; print(m.nothing)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "has no attribute 'nothing'" in done.stderr


# --- the job secret


def secret_file(path: Path, data: bytes = b"sixteen bytes or more", mode: int = 0o600) -> Path:
    path.write_bytes(data)
    path.chmod(mode)
    return path


def test_a_secret_file_is_read(tmp_path: Path) -> None:
    configure(secret_file=secret_file(tmp_path / "s"))
    assert configured_secret() == Secret(b"sixteen bytes or more")


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o777])
def test_a_secret_that_others_can_read_is_refused(tmp_path: Path, mode: int) -> None:
    path = secret_file(tmp_path / "s", mode=mode)
    with pytest.raises(errors.ConfigError, match=f"mode {mode:04o}.*chmod 600 {path}"):
        Secret.from_file(path)


def test_what_is_no_secret_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo", 0o600)
    for path, why in [
        (tmp_path / "none", "No such file"),
        (tmp_path, "not a regular file"),
        (tmp_path / "fifo", "not a regular file"),
        (secret_file(tmp_path / "short", b"short"), "16 to 4096 bytes, but has 5"),
        (secret_file(tmp_path / "long", b"x" * 5000), "but has 5000"),
        (None, "secret_file is None"),
        ("a\0b", "must be the path of a file"),
    ]:
        with pytest.raises(errors.ConfigError, match=why):
            Secret.from_file(path)  # type: ignore[arg-type]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_somebody_elses_secret_is_refused(tmp_path: Path) -> None:
    path = secret_file(tmp_path / "s")
    os.chown(path, 12345, -1)
    with pytest.raises(errors.ConfigError, match="belongs to user 12345"):
        Secret.from_file(path)


def test_a_secret_file_is_written_once_and_privately(tmp_path: Path, secret: Secret) -> None:
    before = os.umask(0)
    try:
        secret.write_file(tmp_path / "s")
    finally:
        os.umask(before)
    assert (tmp_path / "s").stat().st_mode & 0o777 == 0o600
    assert Secret.from_file(tmp_path / "s") == secret
    with pytest.raises(FileExistsError):
        secret.write_file(tmp_path / "s")


def test_a_descriptor_is_read_once_and_closed_and_forgotten(secret: Secret, monkeypatch: pytest.MonkeyPatch) -> None:
    fd = secret.to_fd()
    assert os.get_inheritable(fd)
    monkeypatch.setenv("MONARCH_RDMA_SECRET_FD", str(fd))
    assert configured_secret() == secret
    assert "MONARCH_RDMA_SECRET_FD" not in os.environ  # for a child, the number would be another file
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(fd)
    assert configured_secret() == secret


def test_a_pipe_gives_a_secret_too() -> None:
    read, write = os.pipe()
    os.write(write, b"sixteen bytes")
    os.write(write, b" or more")
    os.close(write)
    assert Secret.from_fd(read) == Secret(b"sixteen bytes or more")


def test_what_gives_no_secret_is_refused() -> None:
    read, write = os.pipe()
    os.write(write, b"short")
    os.close(write)
    with pytest.raises(errors.ConfigError, match="but gave 5"):
        Secret.from_fd(read)
    with pytest.raises(errors.ConfigError, match="not open"):
        Secret.from_fd(987654)
    for number in ("3", None, True, -1, 2**40):
        with pytest.raises(errors.ConfigError, match="must be the number of an open descriptor"):
            Secret.from_fd(number)  # type: ignore[arg-type]
    directory = os.open("/", os.O_RDONLY)
    with pytest.raises(errors.ConfigError, match="neither a file nor a pipe"):
        Secret.from_fd(directory)
    os.close(directory)


def test_two_sources_of_a_secret_are_one_too_many(tmp_path: Path) -> None:
    configure(secret_file=secret_file(tmp_path / "s"), secret_fd=99)
    with pytest.raises(errors.ConfigError, match="both secret_file"):
        configured_secret()


def test_a_secret_does_not_show_itself(secret: Secret) -> None:
    import pickle

    assert repr(secret) == "<Secret of 32 bytes>"
    with pytest.raises(errors.ConfigError, match="cannot be pickled"):
        pickle.dumps(secret)
    for unusable in (b"short", "a text of sixteen letters", b"x" * 4097):
        with pytest.raises(errors.ConfigError):
            Secret(unusable)  # type: ignore[arg-type]
