"""A reader and a collective from another package, found through entry points."""

import sys
import zipfile
from pathlib import Path

import pytest
from small_networks import linear
from spark_tables import quiet, waves

from ringspark.estimators import TorchRegressor
from ringspark.estimators.collectives import collective_class
from ringspark.pipelines import check_engine

# Each one writes a file per rank.
PARTS = """
from pathlib import Path
from ringspark.estimators.collectives.torch_collective import TorchCollective
from ringspark.pipelines import ShardReader
from ringspark.pipelines.readers.arrow_reader import ArrowReader

SEEN = Path({seen!r})

class Reader(ArrowReader):
    engine = "outside"
    def read_tables(self, indexes):
        (SEEN / f"reader-{{self.shard}}").touch()
        return super().read_tables(indexes)

class Collective(TorchCollective):
    name = "outside"
    @classmethod
    def connect(cls, member, rendezvous):
        (SEEN / f"collective-{{member.rank}}").touch()
        return super().connect(member, rendezvous)

class Half:
    def connect(self, member, rendezvous): ...

class Unfinished(ShardReader):
    engine = "unfinished"

class Stranger:
    def read_tables(self, indexes): ...

function = print
"""


def distribution(name: str, readers: str = "", collectives: str = "", **modules: str) -> dict[str, str]:
    """Writes the files of an installed package with that name."""
    info = f"{name}-1.0.dist-info"
    return {f"{module}.py": text for module, text in modules.items()} | {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n",
        f"{info}/entry_points.txt": f"[ringspark.readers]\n{readers}\n"
        f"[ringspark.collectives]\n{collectives}\n",
    }


def put(folder: Path, files: dict[str, str]) -> None:
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)


@pytest.fixture
def path(tmp_path, monkeypatch):
    """Adds a folder to this process's path and removes its modules afterwards."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path / "site"
    for name in set(sys.modules) - before:
        if name.startswith("outside"):
            del sys.modules[name]


@pytest.mark.spark
def test_a_gang_reads_and_talks_by_parts_of_another_package(spark, tmp_path, path):
    if not hasattr(spark, "sparkContext"):
        pytest.skip("the files of a Connect client travel otherwise")
    seen = tmp_path / "seen"
    seen.mkdir()
    names = ("outside = outside_parts:Reader", "outside = outside_parts:Collective")
    files = distribution("outside_parts", *names, outside_parts=PARTS.format(seen=str(seen)))
    archive = tmp_path / "outside_parts.zip"
    with zipfile.ZipFile(archive, "w") as file:
        for name, text in files.items():
            file.writestr(name, text)
    # As with --py-files, on the driver and in every Python worker.
    spark.sparkContext.addPyFile(str(archive))
    losses = []
    for parts in ("outside", None):
        settings = {"numWorkers": 2, "reader": parts, "collective": parts or "torch"}
        estimator = quiet(TorchRegressor, tmp_path, model=linear(), batchSize=10, **settings)
        losses.append(estimator.fit(waves(spark)).summary.epochs[0].train_loss)
    assert {file.name for file in seen.iterdir()} == {"reader-0", "reader-1", "collective-0", "collective-1"}
    assert losses[0] == losses[1]


BAD = [
    ("outside_broken:Part", "No module named 'not_there'; repair or uninstall its package"),
    ("outside_some:Nothing", "has no attribute 'Nothing'; repair or uninstall its package"),
    ("outside_some:function", r"\(outside_some:function\) lacks a class"),
]


@pytest.mark.parametrize(
    ("setting", "value", "sentence"),
    [
        *((setting, *row) for setting in ("reader", "collective") for row in BAD),
        ("reader", "outside_some:Stranger", r"\(outside_some.Stranger\) must subclass ShardReader"),
        ("reader", "outside_some:Unfinished", r"\(outside_some:Unfinished\) lacks read_tables; "),
        ("collective", "outside_some:Half", r"lacks abort, all_gather, all_reduce, .*, start_sum; "),
    ],
)
def test_a_part_that_cannot_serve_is_refused_in_one_sentence(path, setting, value, sentence):
    modules = {"outside_broken": "import not_there", "outside_some": PARTS.format(seen="")}
    put(path, distribution("outside_bad", *[f"bad = {value}"] * 2, **modules))
    check = check_engine if setting == "reader" else collective_class
    with pytest.raises(ValueError, match=f"^{setting} 'bad' .*{sentence}"):
        check("bad")


def test_an_unknown_name_is_told_those_that_packages_declare(path):
    put(path, distribution("outside_one", "mine = outside_some:Reader"))
    with pytest.raises(ValueError, match=r"^reader must be one of arrow, mine, petastorm, got 'mime'"):
        TorchRegressor(reader="mime")
    with pytest.raises(ValueError, match=r"arrow, mine, petastorm, got 'mime'; to use another name, install"):
        check_engine("mime")
    put(path, distribution("outside_two", "mine = outside_other:Reader"))
    told = "'mine' is declared by several packages, as outside_other:Reader and as outside_some"
    with pytest.raises(ValueError, match=told):
        check_engine("mine")
