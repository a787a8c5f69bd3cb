"""Records of experiments, and the store that keeps them: one JSON file a record, under ``data/``.

A record is ``{"schema", "experiment", "kind", "status", "parameters", "metrics", "provenance"}``. Its file is
``<root>/<experiment>/<key>.json``, where the key is a hash of kind and parameters, so a cell of a sweep that is run
again replaces its own record and no other.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import hashlib
import json
import math
import os
import platform
import re
import subprocess
import uuid
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from .device import describe, resolve_device
from .kernels.products import has_instructions
from .launch import LaunchError

SCHEMA = 1
KINDS = ("reported", "derived", "simulated", "emulated", "measured")
STATUSES = ("ok", "oom", "failed")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")
_OUT_OF_MEMORY = re.compile(
    r"OutOfMemoryError|\bMemoryError\b|(CUDA|HIP|NPU|XPU) out of memory|DefaultCPUAllocator: (can't|not enough)"
)
_REPOSITORY = Path(__file__).resolve().parents[1]


@dataclass(frozen=True, kw_only=True)
class Record:
    """One result. ``parameters`` say what was run and identify it; ``metrics`` are what came out, if it is ok.

    Raises ``ValueError`` or ``TypeError``, naming the field, for anything that JSON would not carry unchanged: NaN,
    infinities, arrays, dtypes, keys that are no strings.
    """

    experiment: str
    kind: str
    parameters: dict[str, Any]
    metrics: dict[str, Any] = field(default_factory=dict)
    status: str = "ok"
    provenance: dict[str, Any] = field(default_factory=lambda: provenance())
    schema: int = SCHEMA

    def __post_init__(self) -> None:
        _check_name(self.experiment)
        _check_known("kind", self.kind, KINDS)
        _check_known("status", self.status, STATUSES)
        if type(self.schema) is not int or self.schema != SCHEMA:
            raise ValueError(f"schema is {self.schema!r}, this version reads {SCHEMA}")
        for name in ("parameters", "metrics", "provenance"):
            value = getattr(self, name)
            if not isinstance(value, Mapping):
                raise TypeError(f"{name} must be a mapping, got {value!r}")
            object.__setattr__(self, name, _unnested(value, name))

    @property
    def key(self) -> str:
        """What identifies the record within its experiment."""
        return _key(self.kind, self.parameters)

    @classmethod
    def from_json(cls, text: str) -> Record:
        """Read what :meth:`to_json` wrote. Raises ``ValueError`` or ``TypeError`` for anything else."""
        try:
            data = json.loads(text, parse_constant=_no_constant)
        except RecursionError:
            raise ValueError("is nested too deeply") from None
        if not isinstance(data, dict):
            raise ValueError(f"a record is a JSON object, this is {type(data).__name__}")
        fields = cls.__dataclass_fields__
        if missing := sorted(fields.keys() - data.keys()):
            raise ValueError(f"lacks {', '.join(missing)}")
        if unknown := sorted(data.keys() - fields.keys()):
            raise ValueError(f"has unknown fields {', '.join(unknown)}")
        return cls(**data)

    def to_json(self) -> str:
        """The record as indented JSON, ending in a newline."""
        return json.dumps(asdict(self), indent=1, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n"


class Store:
    """Records under ``root`` (by default ``data/local``). Safe with several writers, and readable at any time."""

    def __init__(self, root: str | Path | None = None) -> None:
        self.root = data_dir() / "local" if root is None else Path(root)

    def path(self, experiment: str, kind: str, parameters: Mapping[str, Any]) -> Path:
        """The file of a record."""
        _check_name(experiment)
        _check_known("kind", kind, KINDS)
        return self.root / experiment / f"{_key(kind, _unnested(parameters, 'parameters'))}.json"

    def write(self, record: Record) -> Path:
        """Store ``record``, whole or not at all; it replaces an earlier one of the same kind and parameters.

        Raises ``OSError`` where it cannot be stored, for instance on a full disk; what was there is then unharmed.
        """
        path = self.path(record.experiment, record.kind, record.parameters)
        temporary = path.with_name(f".{path.stem}.{uuid.uuid4().hex}.tmp")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with temporary.open("x", encoding="utf-8") as file:
                file.write(record.to_json())
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
            _sync_directory(path.parent)
        except OSError as error:
            raise OSError(
                error.errno,
                f"the record was not stored ({error.strerror}); make room or choose another store",
                str(path),
            ) from error
        finally:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
        return path

    def load(
        self,
        experiment: str,
        *,
        kind: str | None = None,
        status: str | None = None,
        strict: bool = True,
        **parameters: Any,
    ) -> list[Record]:
        """Records of an experiment, those whose parameters have the given values; none is an empty list.

        A damaged file raises ``ValueError`` that names it; ``strict=False`` warns and leaves it out.
        """
        _check_name(experiment)
        for name, value, known in (("kind", kind, KINDS), ("status", status, STATUSES)):
            if value is not None:
                _check_known(name, value, known)
        wanted = _unnested(parameters, "parameters")
        records = []
        for path in sorted((self.root / experiment).glob("[!.]*.json")):
            try:
                record = _read(path)
            except FileNotFoundError:
                continue  # removed since it was listed
            except ValueError as error:
                if strict:
                    raise
                warnings.warn(str(error), stacklevel=2)
                continue
            if (
                kind in (None, record.kind)
                and status in (None, record.status)
                and all(name in record.parameters and _same(record.parameters[name], v) for name, v in wanted.items())
            ):
                records.append(record)
        return records

    def find(self, experiment: str, kind: str, parameters: Mapping[str, Any]) -> Record | None:
        """The record of exactly these parameters, if there is one. Raises ``ValueError`` for a damaged file."""
        try:
            return _read(self.path(experiment, kind, parameters))
        except FileNotFoundError:
            return None

    def missing(
        self, experiment: str, kind: str, cells: Iterable[Mapping[str, Any]], retry: tuple[str, ...] = ("failed",)
    ) -> list[dict[str, Any]]:
        """The ``cells`` (parameters) of a sweep that have no record yet, or one whose status is in ``retry``."""
        todo = []
        for cell in cells:
            record = self.find(experiment, kind, cell)
            if record is None or record.status in retry:
                todo.append(dict(cell))
        return todo


def run_cell(
    store: Store,
    experiment: str,
    parameters: Mapping[str, Any],
    fn: Callable[..., Mapping[str, Any]],
    *,
    kind: str = "measured",
    rerun: bool = False,
    **where: Any,
) -> Record:
    """One cell of a sweep: its record from the store, else that of ``fn(**parameters)``, which returns the metrics.

    Running out of memory is a result: a record of status ``oom``. Any other error is recorded as ``failed``, which the
    next run tries again, and raised. An interrupt records nothing. ``where`` goes to :func:`provenance`.
    """
    known = store.find(experiment, kind, parameters)
    if known is not None and known.status != "failed" and not rerun:
        return known

    def record(status: str, metrics: Mapping[str, Any], **notes: Any) -> Record:
        result = Record(
            experiment=experiment,
            kind=kind,
            status=status,
            parameters=dict(parameters),
            metrics=dict(metrics),
            provenance=provenance(**where) | notes,
        )
        store.write(result)
        return result

    try:
        metrics = fn(**parameters)
    except Exception as error:
        if not is_out_of_memory(error):
            record("failed", {}, error=_short(error))
            raise
        problem = _short(error)
    else:
        return record("ok", metrics)
    # Outside the handler: the traceback, which holds the tensors, is gone by now.
    gc.collect()
    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()
    return record("oom", {}, error=problem)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether ``error`` says that memory ran out, here or on a rank of a launch."""
    if isinstance(error, LaunchError):
        return any(_OUT_OF_MEMORY.search(text) for text in error.failures.values())
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and _OUT_OF_MEMORY.search(str(error)) is not None
    )


def provenance(
    *, device: str | torch.device | None = None, backend: str | None = None, ranks: int = 1, **further: Any
) -> dict[str, Any]:
    """Where a record comes from: hardware, torch, driver, backend, ranks, commit, date, Python and platform."""
    where = resolve_device(device)
    driver = {"cuda": torch.version.cuda, "npu": getattr(torch.version, "cann", None)}.get(where.type)
    return {
        "hardware": describe(where) if where.type != "cpu" else f"{describe(where)}, {_cpu()}",
        "device": where.type,
        "torch": torch.__version__,
        "driver": driver,
        "backend": backend,
        "ranks": ranks,
        "commit": _commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        **further,
    }


def _cpu() -> str:
    """What tells apart CPUs that go by one name: cores, vector instructions, and whether bf16 is among them."""
    bf16 = "with" if has_instructions(torch.bfloat16) else "without"
    return f"{os.cpu_count()} cores, {torch.backends.cpu.get_cpu_capability()} {bf16} bf16"


def data_dir() -> Path:
    """The repository's ``data``: ``LAGA_DATA`` if set, else beside this package, else above the working directory."""
    if named := os.environ.get("LAGA_DATA"):
        return Path(named).expanduser().resolve()
    for root in (_REPOSITORY, Path.cwd(), *Path.cwd().parents):
        if (root / "data" / "paper").is_dir():
            return root / "data"
    raise FileNotFoundError(
        "no data/paper here or above; run inside a checkout, or set LAGA_DATA to its data directory"
    )


def published(experiment: str, **parameters: Any) -> list[Record]:
    """The completed records of an experiment under ``data/published``, of every hardware that has some."""
    folders = sorted(path for path in (data_dir() / "published").glob("*") if path.is_dir())
    return [record for folder in folders for record in Store(folder).load(experiment, status="ok", **parameters)]


def _read(path: Path) -> Record:
    try:
        record = Record.from_json(path.read_text(encoding="utf-8"))
        if (path.parent.name, path.stem) != (record.experiment, record.key):
            raise ValueError("its name does not match its experiment, kind and parameters: it was moved or edited")
    except (ValueError, TypeError, IsADirectoryError) as error:
        raise ValueError(
            f"{path}: not a valid record: {error}. Restore the file, or delete it and run again"
        ) from error
    return record


def _key(kind: str, parameters: dict[str, Any]) -> str:
    text = json.dumps([kind, parameters], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _same(a: Any, b: Any) -> bool:
    """Whether two parameters are equal, and not just because Python counts True as 1."""
    return bool(a == b) and isinstance(a, bool) == isinstance(b, bool)


def _unnested(value: Any, where: str) -> Any:
    try:
        return _plain(value, where)
    except RecursionError:
        raise ValueError(f"{where} is nested too deeply, or holds itself") from None


def _plain(value: Any, where: str) -> Any:
    """``value`` as JSON gives it back; the error says where it is not."""
    if isinstance(value, str):
        return _text(value, where)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        if value.bit_length() > 1024:
            raise ValueError(f"{where} is a number of {value.bit_length()} bits; at most 1024 can be read everywhere")
        return value
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"{where} is {value}, which JSON cannot hold; leave it out, or record a status")
        return value
    if isinstance(value, Mapping):
        if odd := [key for key in value if not isinstance(key, str)]:
            raise TypeError(f"{where} has the key {odd[0]!r}; keys must be strings")
        return {_text(key, f"a key of {where}"): _plain(item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, f"{where}[{place}]") for place, item in enumerate(value)]
    raise TypeError(f"{where} is a {type(value).__name__}; use numbers, strings, lists and mappings of them")


def _text(value: str, where: str) -> str:
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise ValueError(f"{where} is {value!r}, which holds half a character (a lone surrogate)") from None
    return value


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number that a record may hold")


def _check_name(experiment: Any) -> None:
    if not isinstance(experiment, str) or not _NAME.fullmatch(experiment):
        raise ValueError(
            f"experiment must be a name of at most 100 letters, digits, '-', '_' and '.', got {experiment!r}"
        )


def _check_known(field_name: str, value: Any, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ValueError(f"{field_name} is {value!r}; known: {', '.join(known)}")


def _short(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[-2000:]


def _sync_directory(directory: Path) -> None:
    with contextlib.suppress(OSError):  # not every file system can
        handle = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


@functools.cache
def _commit() -> str | None:
    """The commit this code is at, with ``-dirty`` where files differ; ``None`` outside a checkout."""
    command = ["git", "-C", str(_REPOSITORY), "describe", "--always", "--dirty", "--exclude=*", "--abbrev=40"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.strip() or None
