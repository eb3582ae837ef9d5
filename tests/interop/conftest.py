from __future__ import annotations

import pytest
from fake_driver import Driver

from flashcli.gpu import launcher
from flashcli.interop import prepared
from flashcli.kernels import compiler


@pytest.fixture
def driver(monkeypatch) -> Driver:
    """A fake driver in the place of NVIDIA's, and a compiler that gives its options as machine code."""
    fake = Driver()
    for name in ("_primary", "_others"):
        monkeypatch.setattr(launcher, name, {})
    monkeypatch.setattr(launcher, "bindings", lambda: fake)
    for module in ("flashcli.interop.memory", "flashcli.interop.anyones"):
        monkeypatch.setattr(f"{module}.bindings", lambda: fake)
    monkeypatch.setattr(compiler, "cubin", lambda build, arch: " ".join(compiler.options(build)).encode())
    prepared.prepare.cache_clear()
    yield fake
    prepared.prepare.cache_clear()
