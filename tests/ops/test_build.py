"""Compiling the kernels: once, whole or not at all, and with a reason where it cannot be done."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
import torch

from torchgt import AttentionPattern, graph_attention
from torchgt.attention import build, token_dropout

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the kernels are built on Linux only")

ROOT = Path(build.__file__).parents[2]


class Child:
    """A forked process that runs `function` with nothing loaded yet and a given environment."""

    def __init__(self, function, *arguments, **environment):
        context = multiprocessing.get_context("fork")  # spares the import of torch
        self.receiver, sender = context.Pipe(duplex=False)
        self.process = context.Process(target=self._run, args=(sender, function, arguments, environment))
        self.process.start()
        sender.close()

    @staticmethod
    def _run(sender, function, arguments, environment):
        for key in [key for key in os.environ if key.startswith("TORCHGT_")]:
            del os.environ[key]
        os.environ.update(environment)
        build._state = None
        sender.send(function(*arguments))

    def answer(self):
        value = self.receiver.recv()
        self.process.join()
        return value


def load_tiny(sources):
    """A library of one line instead of the kernels: what is tested is how, not what, they are built."""
    build._SOURCES, build._UNITS = sources, ("tiny.cpp",)
    return build.load()


@pytest.fixture
def sources(tmp_path):
    folder = tmp_path / "csrc"
    folder.mkdir()
    (folder / "tiny.cpp").write_text("int torchgt_tiny() { return 1; }\n")
    return folder


@pytest.fixture
def compiler(tmp_path):
    """A compiler that logs each file it compiles and waits as long as the file `wait` says."""
    path = tmp_path / "compiler"
    path.write_text(
        f'#!/bin/sh\ncase "$*" in *" -c "*) echo "$*" >> {tmp_path}/log; '
        f'[ -e {tmp_path}/wait ] && sleep "$(cat {tmp_path}/wait)";; esac\nexec g++ "$@"\n'
    )
    path.chmod(0o755)
    return path


def compiled_files(tmp_path) -> int:
    log = tmp_path / "log"
    return len(log.read_text().splitlines()) if log.exists() else 0


def test_two_processes_compile_once_and_a_third_not_at_all(tmp_path, sources, compiler):
    (tmp_path / "wait").write_text("2")
    cache = tmp_path / "cache"
    environment = {"CXX": str(compiler), "TORCHGT_CACHE": str(cache)}
    both = [Child(load_tiny, sources, **environment) for _ in range(2)]
    assert [child.answer() for child in both] == [True, True]
    assert Child(load_tiny, sources, **environment).answer() is True
    assert compiled_files(tmp_path) == 1
    assert len(list(cache.glob("*.so"))) == 1 and not list(cache.glob("build-*"))


def test_a_killed_build_blocks_nobody(tmp_path, sources, compiler):
    (tmp_path / "wait").write_text("30")
    cache = tmp_path / "cache"
    environment = {"CXX": str(compiler), "TORCHGT_CACHE": str(cache)}
    first = Child(load_tiny, sources, **environment).process
    deadline = time.monotonic() + 100
    while not compiled_files(tmp_path):
        assert first.is_alive() and time.monotonic() < deadline
        time.sleep(0.05)
    os.kill(first.pid, signal.SIGKILL)
    first.join()
    assert not list(cache.glob("*.so"))
    (tmp_path / "wait").unlink()
    assert Child(load_tiny, sources, **environment).answer() is True
    assert compiled_files(tmp_path) == 2


def test_a_changed_source_is_compiled_anew(tmp_path, sources, compiler):
    environment = {"CXX": str(compiler), "TORCHGT_CACHE": str(tmp_path / "cache")}
    assert Child(load_tiny, sources, **environment).answer() is True
    (sources / "tiny.cpp").write_text("int torchgt_tiny() { return 2; }\n")
    assert Child(load_tiny, sources, **environment).answer() is True
    assert Child(load_tiny, sources, **environment, TORCHGT_PORTABLE="1").answer() is True
    flags = (tmp_path / "log").read_text().splitlines()
    assert len(flags) == 3 and "-mavx2" not in flags[2]
    assert not any("fast-math" in line for line in flags)


@pytest.mark.parametrize(
    ("environment", "reason"),
    [
        ({"CXX": "no-such-compiler"}, "no C++ compiler: 'no-such-compiler' is not on the PATH"),
        ({"CXX": "false"}, "the C++ compiler"),
        ({"TORCHGT_NO_CPP": "1"}, "switched off by TORCHGT_NO_CPP=1"),
        ({"TORCHGT_CACHE": "/proc/none"}, "cannot write the folder of compiled kernels /proc/none"),
    ],
)
def test_no_kernels_is_a_reason_not_a_crash(tmp_path, sources, environment, reason):
    answer = Child(load_tiny, sources, **({"TORCHGT_CACHE": str(tmp_path / "cache")} | environment)).answer()
    assert reason in answer and "\n" not in answer


def test_a_compiler_error_is_one_line_and_leaves_nothing(tmp_path, sources):
    (sources / "tiny.cpp").write_text("int broken( {\n")
    answer = Child(load_tiny, sources, TORCHGT_CACHE=str(tmp_path / "cache")).answer()
    assert "failed" in answer and "error" in answer and "\n" not in answer
    assert not list((tmp_path / "cache").glob("*.so")) and not list((tmp_path / "cache").glob("build-*"))


def test_a_truncated_library_is_a_reason(tmp_path, sources):
    def load_broken():
        build._SOURCES = sources
        build.library_path().parent.mkdir()
        build.library_path().write_bytes(b"no library")
        return build.load()

    assert "do not load" in Child(load_broken, TORCHGT_CACHE=str(tmp_path / "cache")).answer()


def attend_without_kernels():
    x = torch.randn(3, 2, 4)
    pattern = AttentionPattern.from_pairs(torch.arange(4), torch.arange(3))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        outs = [graph_attention(x, x, x, pattern) for _ in range(2)]
        kept = token_dropout(torch.ones(100, 10), 0.5, torch.tensor(1)) > 0
    messages = [str(warning.message) for warning in caught if warning.category is RuntimeWarning]
    return all(torch.allclose(out, x) for out in outs), messages, int(kept.sum())


def test_attention_without_a_compiler(tmp_path):
    right, messages, kept = Child(attend_without_kernels, CXX="no-such-compiler", TORCHGT_CACHE=str(tmp_path)).answer()
    assert right and 400 < kept < 600
    assert len(messages) == 1 and "gather/scatter" in messages[0] and "no C++ compiler" in messages[0]


def test_loading_does_not_import_the_extension_builder():
    if build.load() is not True:
        pytest.skip(str(build.load()))
    code = """
import sys
from torchgt.attention import build
assert build.load() is True
assert "torch.utils.cpp_extension" not in sys.modules and "filelock" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


@pytest.mark.long
def test_the_portable_build_computes_the_same(tmp_path):
    code = """
import pytest, sys
files = ["tests/ops/test_attention.py", "tests/ops/test_token_dropout.py"]
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", *files]))
"""
    env = os.environ | {"TORCHGT_PORTABLE": "1", "TORCHGT_CACHE": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]
