"""Which kernels a CPU gets, where they are kept, and what happens where there are none."""

from __future__ import annotations

import logging
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from outrider.engine import Engine, EngineConfig, Row
from outrider.engine.backends import cpu
from outrider.engine.backends.cpu import build, variants
from outrider.engine.checkpoints.checkpoints import CheckpointError
from outrider.engine.loading.loader import load_engine
from outrider.engine_config import NATIVE_VARIANTS

PROMPT = list(range(3, 43))
AVX2_ALONE = frozenset({"avx2", "fma"})

needs_kernels = pytest.mark.skipif(shutil.which("cc") is None, reason="no compiler")


@pytest.fixture(autouse=True)
def nothing_loaded_yet() -> Iterator[None]:
    """A process that starts."""
    build._load.cache_clear()
    yield
    build._load.cache_clear()


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty one, for libraries that are compiled in no time."""
    sources = tmp_path / "sources"
    sources.mkdir()
    names = ("granted", "layout", "forward", "project", "move", "start_helpers")
    (sources / "step.c").write_text("".join(f"int outrider_{name}(void) {{ return 1; }}" for name in names))
    monkeypatch.setattr(build, "SOURCES", sources)
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)


def load(path: Path, **settings: str) -> Engine:
    return load_engine(path, EngineConfig(num_blocks=16, **settings))  # type: ignore[arg-type]


def has(monkeypatch: pytest.MonkeyPatch, features: frozenset[str]) -> None:
    monkeypatch.setattr(variants, "cpu_features", lambda: features)


def test_the_config_knows_every_variant() -> None:
    assert ("auto", *(variant.name for variant in variants.VARIANTS)) == NATIVE_VARIANTS


def test_the_quickest_variant_that_the_cpu_has_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    for known in variants.VARIANTS:
        has(monkeypatch, known.features)
        fits = [variant.name for variant in variants.VARIANTS if not variant.missing]
        assert fits[0] == known.name and fits[-1] == "portable"


@needs_kernels
def test_an_engine_names_its_variant(tiny: Path) -> None:
    assert load(tiny).info.execution == f"native-{cpu.runnable_variants()[0]}"


# Compiling a variant that no other quick test needs is some 5 s of processor time.
@pytest.mark.slow
@needs_kernels
def test_the_portable_variant_runs_where_it_is_asked_for(tiny: Path) -> None:
    assert load(tiny, native_variant="portable").info.execution == "native-portable"


@pytest.mark.slow
@needs_kernels
def test_a_bfloat16_model_starts_where_there_is_no_more_than_avx2(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if "avx2" not in cpu.runnable_variants():
        pytest.skip("no AVX2")
    has(monkeypatch, AVX2_ALONE)
    engine = load(tiny)
    assert (engine.info.execution, engine.info.dtype) == ("native-avx2", "bfloat16")
    assert engine.forward([Row(engine.kv.open([]), PROMPT, 1)]).isfinite().all()


def test_a_variant_that_the_cpu_cannot_run_is_refused_by_name(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    has(monkeypatch, frozenset({"avx2"}))
    with pytest.raises(CheckpointError, match="native_variant: avx2 cannot run on this CPU: it lacks fma"):
        load(tiny, native_variant="avx2")
    with pytest.raises(ValueError, match="native_variant: 'sse9' is not one of auto, amx"):
        EngineConfig(native_variant="sse9")


@pytest.mark.usefixtures("no_compiler")
def test_without_a_compiler_a_bfloat16_model_runs_in_float32_and_says_what_that_costs(
    tiny: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        engine = load(tiny)
    assert engine.info.dtype == "float32" and not engine.info.execution.startswith("native")
    warned = [record.getMessage() for record in caplog.records]
    assert len(warned) == 1
    assert "no C compiler" in warned[0] and "twice the memory and several times slower" in warned[0]
    want = load(tiny, dtype="float32")
    logits = [e.forward([Row(e.kv.open([]), PROMPT, 1)]).clone() for e in (engine, want)]
    assert torch.equal(*logits)


@pytest.mark.usefixtures("no_compiler")
def test_where_kernels_are_required_their_absence_is_refused(tiny: Path) -> None:
    with pytest.raises(CheckpointError, match=r"execution: native kernels are required, .* no C compiler"):
        load(tiny, execution="native")


@needs_kernels
def test_kernels_that_were_compiled_ahead_need_no_compiler(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = build.compile_variants(tmp_path / "kernels")
    assert "portable" in str(made[-1]) and len(made) in (1, len(variants.VARIANTS))
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o755 for path in made)
    monkeypatch.setenv("OUTRIDER_KERNELS", str(tmp_path / "kernels"))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    assert build._compiled(variants.VARIANTS[-1]) == made[-1] and not cache.exists()
    # Others may have put it there.
    made[-1].chmod(0o777)
    with pytest.raises(PermissionError, match="others may write"):
        build._compiled(variants.VARIANTS[-1])


@needs_kernels
def test_kernels_of_other_sources_are_not_taken(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build.compile_variants(tmp_path / "kernels")
    monkeypatch.setenv("OUTRIDER_KERNELS", str(tmp_path / "kernels"))
    (build.SOURCES / "more.h").write_text("")
    assert build._compiled(variants.VARIANTS[-1]).is_relative_to(cache)


def test_a_cache_that_cannot_be_made_costs_speed_not_the_start(tiny: Path, cache: Path) -> None:
    cache.write_text("a file where a directory should be")
    assert load(tiny).info.dtype == "float32"


@needs_kernels
def test_the_cache_is_for_its_owner_alone_and_names_the_variant(cache: Path) -> None:
    (cache / "native").mkdir(parents=True, mode=0o755)
    kernels = cpu.load_kernels("portable")
    directory = cache / "native"
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    (library,) = directory.glob("*.so")
    assert library.name.startswith("llama-portable-") and stat.S_IMODE(library.stat().st_mode) == 0o700
    assert kernels.variant == "portable"


def _writable_directory(cache: Path) -> None:
    (cache / "native").mkdir(parents=True)
    (cache / "native").chmod(0o777)


def _link_for_a_directory(cache: Path) -> None:
    (cache / "elsewhere").mkdir(parents=True)
    (cache / "native").symlink_to(cache / "elsewhere")


def _planted(cache: Path) -> Path:
    """The library's path, after it was compiled, and another process that starts."""
    cpu.load_kernels("portable")
    build._load.cache_clear()
    (library,) = (cache / "native").glob("*.so")
    return library


def _writable_library(cache: Path) -> None:
    _planted(cache).chmod(0o722)


def _link_for_a_library(cache: Path) -> None:
    library = _planted(cache)
    library.rename(cache / "elsewhere.so")
    library.symlink_to(cache / "elsewhere.so")


@needs_kernels
@pytest.mark.parametrize("plant", [_writable_directory, _link_for_a_directory, _writable_library, _link_for_a_library])
def test_a_library_that_another_user_may_have_written_is_not_loaded(plant: object, cache: Path) -> None:
    assert callable(plant)
    plant(cache)
    with pytest.raises(build.KernelsMissing, match=r"others may write|a link"):
        cpu.load_kernels("portable")


@needs_kernels
@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
@pytest.mark.parametrize("what", ["native", "native/library"])
def test_a_library_that_another_user_owns_is_not_loaded(what: str, cache: Path) -> None:
    library = _planted(cache)
    os.chown(library if what == "native/library" else library.parent, 12345, -1)
    with pytest.raises(build.KernelsMissing, match="owned by user 12345"):
        cpu.load_kernels("portable")
