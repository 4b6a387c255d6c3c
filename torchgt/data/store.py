"""Graphs on disk: a folder of memory-mapped `.npy` arrays and a `meta.json` that describes them.

Three depths of checking. `GraphStore.open` reads only `meta.json` and the arrays' headers and sizes, so a graph larger
than memory opens at once. `validate` passes once over the values (seconds for millions of nodes, in bounded memory):
a training run calls it. `verify` also recomputes every checksum.

Legend: N nodes, E stored pairs, G graphs, F features, T tasks.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import shutil
import warnings
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from torchgt.errors import unknown

if TYPE_CHECKING:
    from torchgt.graph import Graph

FORMAT = 1
TASKS = ("node", "graph")

# Metrics that each target has, its default first.
METRICS = {
    "multiclass": ("accuracy",),
    "multilabel": ("f1_micro", "rocauc", "ap"),
    "binary": ("rocauc", "ap", "accuracy"),
    "regression": ("mae",),
}

_REQUIRED = (
    "format name task target num_nodes num_edges num_graphs metric splits split_kind directed node_shuffle_seed "
    "source arrays"
).split()
_OPTIONAL = "num_classes num_tasks cardinalities class_names features edges subset extra".split()
_SOURCE = ("url", "sha256", "licence", "version")
_DTYPES = ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_CHUNK = 1 << 22  # elements looked at together


class StoreError(ValueError):
    """A store that is missing or damaged, or data that cannot become one. One line: file, value, what is allowed."""


def metrics_for(target: str) -> tuple[str, ...]:
    """Metrics that a target has, its default first. StoreError for an unknown target."""
    if target not in METRICS:
        raise StoreError(unknown("target", target, METRICS))
    return METRICS[target]


class GraphStore:
    """A graph, its features, labels and splits, opened from or written to a folder.

    Attributes:
        path: the folder.
        meta: the content of `meta.json`.
        graph: `Graph` of N nodes; row i lists the nodes that node i receives from.
        x: [N, F] features; floating, or integer columns with `meta["cardinalities"]`.
        y: [N] or [N, T] (node tasks), [G] or [G, T] (graph tasks). Unlabelled is -1 (integers) or NaN (floats).
        splits: one dict a split, of int64 ids (nodes, or graphs for a graph task) under "train", "valid", "test";
            several named tests appear as "test_<name>".

    The tensors are read-only maps of the files: writing into one crashes the process, so clone it first.
    """

    def __init__(self, path: Path, meta: dict[str, Any], shown: Path | None = None):
        self.path, self.meta = path, meta
        self._shown = shown or path
        self._cache: dict[str, Tensor] = {}

    # Opening ------------------------------------------------------------------------------------------------------

    @classmethod
    def open(cls, path: str | Path) -> GraphStore:
        """Open a store after checking its description against the files' headers and sizes, not their values.

        StoreError if it is missing or half-written, of a newer format, or inconsistent. Keys of `meta.json` that this
        version does not know are kept and ignored: a later version may have added them.
        """
        return cls._open(Path(path), None)

    @classmethod
    def _open(cls, path: Path, shown: Path | None) -> GraphStore:
        where = shown or path
        if not path.is_dir():
            raise StoreError(f"{where}: no such folder; allowed: a prepared store (python -m datasets.prepare)")
        file = path / "meta.json"
        try:
            meta = json.loads(file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise StoreError(f"{where}: has no meta.json; not a store, or one that was not written whole") from None
        except ValueError as error:
            raise StoreError(f"{where}/meta.json: not valid JSON ({error}); prepare the store again") from None
        store = cls(path, meta, shown)
        store._check_meta()
        for name in meta["arrays"]:
            store._check_file(name)
        store._check_shapes()
        return store

    @property
    def name(self) -> str:
        return self.meta["name"]

    @property
    def num_outputs(self) -> int:
        """What a model has to predict: classes (multiclass) or tasks."""
        return self.meta["num_classes" if self.meta["target"] == "multiclass" else "num_tasks"]

    @cached_property
    def digest(self) -> str:
        """SHA-256 (hex) of the description, which holds the checksum of every array: equal digests, equal stores."""
        text = json.dumps(self.meta, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    @cached_property
    def graph(self) -> Graph:
        from torchgt.graph import Graph

        return Graph(self.array("rowptr"), self.array("col"), check=False)

    @property
    def x(self) -> Tensor:
        return self.array("x")

    @property
    def y(self) -> Tensor:
        return self.array("y")

    @cached_property
    def splits(self) -> list[dict[str, Tensor]]:
        return [{role: self.array(_stem(file)) for role, file in _roles(split)} for split in self.meta["splits"]]

    def array(self, name: str) -> Tensor:
        """Any array of the store, as a read-only tensor mapped from its file. StoreError for an unknown name."""
        if name not in self.meta["arrays"]:
            raise StoreError(f"{self._shown}: {unknown('array', name, self.meta['arrays'])}")
        if name not in self._cache:
            with warnings.catch_warnings():
                # A writable private map would count towards a memory budget (RLIMIT_DATA) though nothing is copied.
                warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
                self._cache[name] = torch.from_numpy(self._map(name))
        return self._cache[name]

    def __repr__(self) -> str:
        m = self.meta
        return f"GraphStore({self.name!r}, {m['num_nodes']} nodes, {m['num_edges']} edges, {m['target']} {m['task']}s)"

    # Writing ------------------------------------------------------------------------------------------------------

    @classmethod
    def write(
        cls,
        path: str | Path,
        meta: Mapping[str, Any],
        arrays: Mapping[str, Tensor | np.ndarray],
        *,
        overwrite: bool = False,
    ) -> GraphStore:
        """Write a store and open it. The folder appears whole, after every check of `validate`, or not at all.

        Args:
            path: the folder to make; an empty one is replaced.
            meta: the description. `format`, `num_nodes`, `num_edges`, `num_graphs` and `arrays` are filled in.
                `splits` names files, e.g. `{"train": "split/0-train.npy", ...}`.
            arrays: the arrays by name (the file's path without `.npy`): `rowptr` int64 [N + 1], `col` int32 or
                int64 [E], `x`, `y`, the splits, and any optional ones.
            overwrite: replace a store that is there, or what is left of one whose `meta.json` was deleted.

        StoreError names the key or array at fault; nothing is left behind.
        """
        path = Path(path)
        for key in meta:
            if key not in _REQUIRED + _OPTIONAL:
                raise StoreError(f"meta: {unknown('key', key, _REQUIRED + _OPTIONAL)}")
        check_destination(path, overwrite)
        for name in ("rowptr", "col", "x", "y"):
            if name not in arrays:
                raise StoreError(f"{path}: array {name!r} is missing; given: {', '.join(arrays)}")
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.parent / f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp"
        temporary.mkdir()
        try:
            described = {name: _write_array(temporary, path, name, array) for name, array in arrays.items()}
            counts = {
                "format": FORMAT,
                "num_nodes": max(len(arrays["rowptr"]) - 1, 0),
                "num_edges": len(arrays["col"]),
                "num_graphs": max(len(arrays["graph_ptr"]) - 1, 0) if "graph_ptr" in arrays else 1,
            }
            full = _ordered({**counts, **meta, "arrays": described})
            try:
                text = json.dumps(full, indent=1, allow_nan=False, ensure_ascii=False) + "\n"
            except (TypeError, ValueError) as error:
                raise StoreError(f"{path}/meta.json: cannot be written as JSON ({error})") from None
            with open(temporary / "meta.json", "wb") as handle:
                handle.write(text.encode())
                _sync(handle)
            cls._open(temporary, path).validate()
            for folder in (*(f for f in temporary.rglob("*") if f.is_dir()), temporary):
                _sync_folder(folder)
            _move(temporary, path, overwrite)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        return cls.open(path)

    # Checks of the description ------------------------------------------------------------------------------------

    def _fail(self, file: str, text: str) -> None:
        raise StoreError(f"{self._shown}/{file}: {text}")

    def _need(self, key: str, fine: bool, allowed: str) -> None:
        if not fine:
            self._fail("meta.json", f"{key} is {self.meta[key]!r}; allowed: {allowed}")

    def _check_meta(self) -> None:
        meta = self.meta
        if not isinstance(meta, dict):
            self._fail("meta.json", f"holds a {type(meta).__name__}; allowed: an object")
        version = meta.get("format")
        if type(version) is int and version > FORMAT:
            self._fail("meta.json", f"format is {version}; this version reads {FORMAT}: update it, or prepare again")
        outputs = "num_classes" if meta.get("target") == "multiclass" else "num_tasks"
        for key in (*_REQUIRED, outputs):
            if key not in meta:
                others = [k for k in meta if k not in _REQUIRED + _OPTIONAL]
                found = f" (unknown keys: {', '.join(map(repr, others))})" if others else ""
                self._fail("meta.json", f"key {key!r} is missing{found}")
        self._need("format", type(version) is int and version == FORMAT, str(FORMAT))
        name = meta["name"]
        self._need("name", isinstance(name, str) and bool(_NAME.fullmatch(name)), "letters, digits, '.', '_', '-'")
        for key, allowed in (("task", TASKS), ("target", METRICS)):
            self._need(key, isinstance(meta[key], str) and meta[key] in allowed, ", ".join(allowed))
        metrics = METRICS[meta["target"]]
        self._need("metric", meta["metric"] in metrics, f"{', '.join(metrics)} (target {meta['target']!r})")
        for key, least in (("num_nodes", 1), ("num_edges", 0), ("num_graphs", 1), (outputs, 1)):
            self._need(key, type(meta[key]) is int and meta[key] >= least, f"an integer, at least {least}")
        self._need("directed", isinstance(meta["directed"], bool), "true, false")
        self._need("split_kind", isinstance(meta["split_kind"], str) and bool(meta["split_kind"]), "a text")
        seed = meta["node_shuffle_seed"]
        self._need("node_shuffle_seed", seed is None or type(seed) is int, "an integer, or null if not shuffled")
        source = meta["source"]
        fine = isinstance(source, dict) and all(key in source for key in _SOURCE)
        self._need("source", fine, f"an object with {', '.join(_SOURCE)}")
        self._check_arrays_described()
        splits = meta["splits"]
        self._need("splits", isinstance(splits, list) and bool(splits), "a list of at least one split")
        for split in splits:
            fine = isinstance(split, dict) and {"train", "valid", "test"} <= split.keys()
            self._need("splits", fine, "objects with train, valid and test")
            for role, file in _roles(split):
                if not isinstance(file, str) or not file.endswith(".npy") or _stem(file) not in meta["arrays"]:
                    self._fail("meta.json", f"splits: {role} is {file!r}; allowed: a file that `arrays` describes")

    def _check_arrays_described(self) -> None:
        arrays = self.meta["arrays"]
        self._need("arrays", isinstance(arrays, dict), "an object")
        for name in ("rowptr", "col", "x", "y"):
            if name not in arrays:
                self._fail("meta.json", f"arrays lacks {name!r}; found: {', '.join(arrays)}")
        if self.meta["num_graphs"] != 1 or self.meta["task"] == "graph":
            if "graph_ptr" not in arrays:
                self._fail("meta.json", "arrays lacks 'graph_ptr', which graph tasks and several graphs need")
        for name, described in arrays.items():
            if not all(_NAME.fullmatch(part) for part in name.split("/")):
                self._fail("meta.json", f"arrays: {name!r} is not a file name inside the store")
            if not isinstance(described, dict) or not {"dtype", "shape", "sha256"} <= described.keys():
                self._fail("meta.json", f"arrays: {name!r} is {described!r}; allowed: dtype, shape and sha256")
            if described["dtype"] not in _DTYPES:
                self._fail("meta.json", f"arrays: {name!r} has {unknown('dtype', described['dtype'], _DTYPES)}")
            shape = described["shape"]
            if not isinstance(shape, list) or not all(type(size) is int and size >= 0 for size in shape):
                self._fail("meta.json", f"arrays: {name!r} has shape {shape!r}; allowed: a list of sizes")

    def _check_file(self, name: str) -> None:
        """The header and size of an array's file against its description."""
        file, described = f"{name}.npy", self.meta["arrays"][name]
        try:
            with open(self.path / file, "rb") as handle:
                shape, fortran, dtype, offset = _read_header(handle)
            size = (self.path / file).stat().st_size
        except FileNotFoundError:
            self._fail(file, "is missing, but meta.json describes it; prepare the store again")
        except (ValueError, OSError) as error:
            self._fail(file, f"cannot be read as an array ({error}); prepare the store again")
        expected = np.dtype(described["dtype"])
        if dtype != expected:
            self._fail(file, f"holds {dtype}; meta.json says {described['dtype']}")
        if list(shape) != described["shape"] or fortran:
            self._fail(file, f"has shape {list(shape)}{' column-major' * fortran}; meta.json says {described['shape']}")
        whole = offset + expected.itemsize * int(np.prod(shape, dtype=np.int64))
        if size != whole:
            self._fail(file, f"has {size} bytes; {whole} expected: it was cut off or appended to")

    def _check_shapes(self) -> None:
        meta, arrays = self.meta, self.meta["arrays"]
        n, e, g = meta["num_nodes"], meta["num_edges"], meta["num_graphs"]

        def check(name: str, dtypes: str, *shapes: tuple[int | None, ...]) -> None:
            dtype, shape = arrays[name]["dtype"], arrays[name]["shape"]
            if dtype not in dtypes.split():
                self._fail(f"{name}.npy", f"holds {dtype}; allowed: {dtypes.replace(' ', ', ')}")
            for allowed in shapes:
                if len(shape) == len(allowed) and all(b in (None, a) for a, b in zip(shape, allowed, strict=True)):
                    return
            texts = [str(["any" if size is None else size for size in s]).replace("'", "") for s in shapes]
            self._fail(f"{name}.npy", f"has shape {shape}; allowed: {' or '.join(texts)}")

        integers, floats = "uint8 int8 int16 int32 int64", "float16 float32 float64"
        check("rowptr", "int64", (n + 1,))
        check("col", "int32 int64", (e,))
        check("x", f"{integers} {floats}", (n, None))
        rows = n if meta["task"] == "node" else g
        if meta["target"] == "multiclass":
            check("y", integers, (rows,))
        else:
            tasks = meta["num_tasks"]
            dtypes = floats if meta["target"] == "regression" else f"bool {integers} {floats}"
            check("y", dtypes, (rows, tasks), *([(rows,)] if tasks == 1 else []))
        if "graph_ptr" in arrays:
            check("graph_ptr", "int64", (g + 1,))
        if "edge_pair" in arrays:
            check("edge_pair", "int32 int64", (None,))
        if "edge_attr" in arrays:
            raw = arrays["edge_pair"]["shape"][0] if "edge_pair" in arrays else e
            check("edge_attr", f"{integers} {floats}", (raw,), (raw, None))
        for split in meta["splits"]:
            for _, file in _roles(split):
                check(_stem(file), "int64", (None,))
        cardinalities = meta.get("cardinalities")
        if cardinalities is not None:
            columns = arrays["x"]["shape"][1]
            fine = isinstance(cardinalities, list) and len(cardinalities) == columns
            fine = fine and all(type(size) is int and size >= 1 for size in cardinalities)
            self._need("cardinalities", fine, f"{columns} integers, at least 1, one a column of x")

    # Checks of the values -----------------------------------------------------------------------------------------

    def validate(self) -> GraphStore:
        """Pass once over the values in chunks and return the store.

        StoreError if rows or columns are out of range, unsorted or repeated, an edge joins two graphs, a feature is
        not finite, a label is none of the target's, or a split overlaps, is out of range or has no labelled member.
        """
        self._validate_graph()
        self._validate_x()
        self._validate_y()
        for number, split in enumerate(self.meta["splits"]):
            self._validate_split(number, split)
        return self

    def verify(self) -> GraphStore:
        """Recompute every checksum, then `validate`; also that an undirected store's graph is symmetric."""
        for name, described in self.meta["arrays"].items():
            found = _sha256(self.path / f"{name}.npy")
            if found != described["sha256"]:
                self._fail(f"{name}.npy", f"has sha256 {found}; meta.json says {described['sha256']}: it was altered")
        self.validate()
        if not self.meta["directed"]:
            transposed = self.graph.transpose()
            if not torch.equal(transposed.rowptr, self.graph.rowptr) or not torch.equal(transposed.col, self.graph.col):
                self._fail("col.npy", "is not symmetric, but directed is false")
        return self

    def _validate_graph(self) -> None:
        n, e = self.meta["num_nodes"], self.meta["num_edges"]
        rowptr, col = self._map("rowptr"), self._map("col")
        self._check_pointer("rowptr", e)
        for start, chunk in _chunks(col):
            _in_range(self, "col.npy", chunk, 0, n - 1, start)
            # One element more, so that neighbours across the seam are compared too.
            wide = col[start : start + len(chunk) + 1]
            falls = np.flatnonzero(wide[1:] <= wide[:-1]) + start + 1
            inside = rowptr[np.searchsorted(rowptr, falls)] != falls
            if inside.any():
                at = int(falls[inside][0])
                self._fail(
                    "col.npy", f"entry {at} is {int(col[at])} after {int(col[at - 1])}; allowed: rising in a row"
                )
        if "edge_pair" in self.meta["arrays"]:
            for start, chunk in _chunks(self._map("edge_pair")):
                _in_range(self, "edge_pair.npy", chunk, 0, e - 1, start)
        if "graph_ptr" in self.meta["arrays"]:
            self._check_pointer("graph_ptr", n)
            ptr = self._map("graph_ptr")
            for start, chunk in _chunks(col):
                rows = np.searchsorted(rowptr, np.arange(start, start + len(chunk)), side="right") - 1
                graph = np.searchsorted(ptr, rows, side="right") - 1
                crossing = (chunk < ptr[graph]) | (chunk >= ptr[graph + 1])
                if crossing.any():
                    at = int(np.flatnonzero(crossing)[0])
                    self._fail("col.npy", f"edge {rows[at]} - {chunk[at]} joins two graphs; allowed: edges inside one")

    def _check_pointer(self, name: str, last: int) -> None:
        pointer = self._map(name)
        if pointer[0] != 0 or pointer[-1] != last:
            self._fail(f"{name}.npy", f"runs from {pointer[0]} to {pointer[-1]}; allowed: 0 to {last}")
        for start, chunk in _chunks(pointer):
            falls = np.diff(pointer[start : start + len(chunk) + 1]) < 0
            if falls.any():
                self._fail(f"{name}.npy", f"falls after entry {start + int(np.flatnonzero(falls)[0])}; allowed: rising")

    def _validate_x(self) -> None:
        x = self._map("x")
        cardinalities = self.meta.get("cardinalities")
        rows = max(1, _CHUNK // max(1, x.shape[1]))
        for start, chunk in _chunks(x, rows):
            if chunk.dtype.kind == "f":
                finite = np.isfinite(chunk)
                if not finite.all():
                    i, j = (int(k) for k in np.argwhere(~finite)[0])
                    self._fail("x.npy", f"row {start + i}, column {j} is {chunk[i, j]}; allowed: finite numbers")
            if cardinalities is not None:
                wrong = (chunk < 0) | (chunk >= np.array(cardinalities))
                if wrong.any():
                    i, j = (int(k) for k in np.argwhere(wrong)[0])
                    allowed = f"0..{cardinalities[j] - 1} (cardinalities)"
                    self._fail("x.npy", f"row {start + i}, column {j} is {chunk[i, j]}; allowed: {allowed}")

    def _validate_y(self) -> None:
        y, target = self._map("y"), self.meta["target"]
        for start, chunk in _chunks(y, max(1, _CHUNK // (y.shape[1] if y.ndim == 2 else 1))):
            if target == "multiclass":
                _in_range(self, "y.npy", chunk, -1, self.meta["num_classes"] - 1, start)
                continue
            if target == "regression":
                wrong, allowed = np.isinf(chunk), "finite numbers, NaN for unlabelled"
            elif chunk.dtype.kind == "f":
                wrong, allowed = ~((chunk == 0) | (chunk == 1) | np.isnan(chunk)), "0, 1, NaN for unlabelled"
            else:
                wrong, allowed = (chunk > 1) | (chunk < -1 if chunk.dtype.kind == "i" else False), "0, 1, -1"
            if wrong.any():
                at = np.argwhere(wrong)[0]
                self._fail("y.npy", f"row {start + int(at[0])} is {chunk[tuple(at)]}; allowed: {allowed}")

    def _validate_split(self, number: int, split: dict[str, Any]) -> None:
        y = self._map("y")
        taken, members = np.zeros(len(y), dtype=bool), 0
        for role, file in _roles(split):
            ids = self._map(_stem(file))
            if not len(ids):
                self._fail(file, f"split {number}: {role} is empty; allowed: at least one labelled id")
            any_labelled = False
            for start, chunk in _chunks(ids):
                _in_range(self, file, chunk, 0, len(y) - 1, start)
                if taken[chunk].any():
                    again = int(chunk[taken[chunk]][0])
                    self._fail(file, f"split {number}: id {again} of {role} is already in this split; allowed: once")
                taken[chunk] = True
                any_labelled = any_labelled or _any_labelled(y[chunk])
            members += len(ids)
            if np.count_nonzero(taken) != members:
                self._fail(file, f"split {number}: {role} repeats an id; allowed: each once")
            if not any_labelled:
                self._fail(file, f"split {number}: {role} has no labelled member; allowed: at least one")

    def _map(self, name: str) -> np.ndarray:
        """The array as a read-only map of its file."""
        described = self.meta["arrays"][name]
        shape, dtype = tuple(described["shape"]), np.dtype(described["dtype"])
        if 0 in shape:  # an empty file section cannot be mapped
            return np.zeros(shape, dtype)
        file = self.path / f"{name}.npy"
        with open(file, "rb") as handle:
            offset = _read_header(handle)[3]
        return np.memmap(file, dtype=dtype, mode="r", shape=shape, offset=offset)


# Helpers ----------------------------------------------------------------------------------------------------------


def _stem(file: str) -> str:
    return file.removesuffix(".npy")


def _roles(split: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """(role, file) of a split, several named tests flattened to `test_<name>`."""
    pairs = []
    for role, file in split.items():
        if isinstance(file, dict):
            pairs += [(f"{role}_{name}", named) for name, named in file.items()]
        else:
            pairs.append((role, file))
    return pairs


def _ordered(meta: Mapping[str, Any]) -> dict[str, Any]:
    """The description in one fixed order of keys, so that equal stores are equal files."""
    order = [key for key in _REQUIRED + _OPTIONAL if key != "arrays"] + ["arrays"]
    return {key: meta[key] for key in order if key in meta}


def _chunks(array: np.ndarray, size: int = _CHUNK) -> Iterator[tuple[int, np.ndarray]]:
    for start in range(0, len(array), size):
        yield start, array[start : start + size]


def _in_range(store: GraphStore, file: str, chunk: np.ndarray, low: int, high: int, start: int) -> None:
    wrong = (chunk < low) | (chunk > high)
    if wrong.any():
        at = int(np.flatnonzero(wrong)[0])
        store._fail(file, f"entry {start + at} is {int(chunk[at])}; allowed: {low}..{high}")


def _any_labelled(y: np.ndarray) -> bool:
    return bool((~np.isnan(y)).any() if y.dtype.kind == "f" else (y >= 0).any())


def _read_header(handle: BinaryIO) -> tuple[tuple[int, ...], bool, np.dtype, int]:
    """(shape, column-major?, dtype, offset of the data) of a `.npy` file; ValueError if it is none."""
    version = np.lib.format.read_magic(handle)
    read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    if version not in read:
        raise ValueError(f"npy version {version}")
    shape, fortran, dtype = read[version](handle)
    return shape, fortran, dtype, handle.tell()


class _Hashing:
    """Passes what is written on to a file and hashes it on the way."""

    def __init__(self, handle: BinaryIO):
        self.handle, self.sha256 = handle, hashlib.sha256()

    def write(self, data: bytes) -> int:
        self.sha256.update(data)
        return self.handle.write(data)


def _write_array(folder: Path, shown: Path, name: str, array: Tensor | np.ndarray) -> dict[str, Any]:
    """Write one array; its description."""
    if not all(_NAME.fullmatch(part) for part in name.split("/")):
        raise StoreError(f"{shown}: array {name!r}; allowed: a file name inside the store")
    if isinstance(array, Tensor) and array.dtype == torch.bfloat16:
        raise StoreError(f"{shown}: array {name!r} is bfloat16; allowed: {', '.join(_DTYPES)}")
    values = array.detach().cpu().numpy() if isinstance(array, Tensor) else np.asarray(array)
    if values.dtype.name not in _DTYPES or values.ndim == 0:
        allowed = f"at least one dimension of {', '.join(_DTYPES)}"
        raise StoreError(f"{shown}: array {name!r} is {values.dtype} with shape {values.shape}; allowed: {allowed}")
    values = np.ascontiguousarray(values, dtype=values.dtype.newbyteorder("="))
    file = folder / f"{name}.npy"
    file.parent.mkdir(parents=True, exist_ok=True)
    with open(file, "wb") as handle:
        hashing = _Hashing(handle)
        np.lib.format.write_array(hashing, values, version=(1, 0), allow_pickle=False)
        _sync(handle)
    return {"dtype": values.dtype.name, "shape": list(values.shape), "sha256": hashing.sha256.hexdigest()}


def _sha256(file: Path) -> str:
    with open(file, "rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def _sync(handle: BinaryIO) -> None:
    handle.flush()
    os.fsync(handle.fileno())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _is_store(path: Path) -> bool:
    """Whether a folder is a store, or one that lacks only its `meta.json`: nothing else is ever replaced."""
    if (path / "meta.json").is_file():
        return True
    files = [item for item in path.rglob("*") if not item.is_dir()]
    return {"rowptr.npy", "col.npy"} <= {f.name for f in files} and all(f.suffix == ".npy" for f in files)


def check_destination(path: Path, overwrite: bool) -> None:
    """StoreError unless a store may be written to `path`: cheap, so that it can be asked before the work starts."""
    if not path.exists() or (path.is_dir() and not any(path.iterdir())):
        return
    if not path.is_dir() or not _is_store(path):
        raise StoreError(f"{path}: exists and is not a store; allowed: a new folder")
    if not overwrite:
        raise StoreError(f"{path}: a store is there already; allowed: a new folder, or to overwrite it (--force)")


def _move(temporary: Path, path: Path, overwrite: bool) -> None:
    check_destination(path, overwrite)  # again: another process may have been faster
    old = temporary.with_suffix(".old")
    if path.exists():
        path.rename(old)
    temporary.rename(path)
    _sync_folder(path.parent)
    shutil.rmtree(old, ignore_errors=True)
