"""Building the `native` backend: what is kept when it cannot be."""

import pytest

from longspan.ops.window import native
from longspan.ops.window.native import build


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """A place of its own for the library, so that the one in use stays."""
    monkeypatch.setattr(build, "LIBRARY", tmp_path / "library.so")
    monkeypatch.setattr(build, "FAILURE", tmp_path / "failure.txt")
    native._load.cache_clear()
    yield tmp_path
    native._load.cache_clear()


def test_without_a_compiler_the_reason_is_kept(elsewhere, monkeypatch):
    assert "was not built" in str(native.unavailable())
    native._load.cache_clear()
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(elsewhere))
    assert build.build() == "there is no C++ compiler: install g++ or clang++, or set CXX"
    reason = str(native.unavailable())
    assert "could not be built: there is no C++ compiler" in reason
    assert "native.build" in reason


def test_what_a_compiler_says_is_kept(elsewhere, monkeypatch):
    fake = elsewhere / "compiler"
    fake.write_text("#!/bin/sh\necho 'attention.cpp: no such thing' >&2\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setenv("CXX", str(fake))
    build.LIBRARY.write_text("an old one")
    assert "attention.cpp: no such thing" in str(build.build())
    assert not build.LIBRARY.exists()
    assert "no such thing" in str(native.unavailable())
    monkeypatch.setenv("CXX", "/bin/false")
    assert build.build() == "/bin/false failed with status 1: it says nothing"


def test_a_file_that_is_no_library_is_named(elsewhere):
    build.LIBRARY.write_text("not a library")
    assert "cannot be loaded" in str(native.unavailable())
