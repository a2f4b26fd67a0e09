"""`ringspark pack`: its messages, the archive, and a cluster whose executors have only the archive."""

import gzip
import json
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from importlib.metadata import Distribution
from pathlib import Path, PurePosixPath

import pytest
from command_line import run_ringspark
from namespaces import Network, refusal
from spark_hosts import HERE, SparkHosts
from standalone import spark_environment

from ringspark.extras.packing import pack
from ringspark.extras.packing.archive import write_archive
from ringspark.extras.packing.distributions import choose_distributions, is_packed, list_files


def requirements(folder: Path, text: str) -> Path:
    file = folder / "requirements.txt"
    file.write_text(text)
    return file


def test_a_package_comes_with_what_it_needs(tmp_path: Path) -> None:
    chosen = choose_distributions(requirements(tmp_path, "# of us\nPillow>=9  # images\n\n"), ["sympy"])
    # jinja2 needs markupsafe; torch needs both jinja2 and sympy.
    assert {"ringspark", "torch", "pyarrow", "pillow", "jinja2", "markupsafe"} <= set(chosen)
    assert not {"pyspark", "py4j", "sympy", "mypy", "pytest"} & set(chosen)
    assert {"mypy", "pytest"} <= set(choose_distributions(None, []))


@pytest.mark.parametrize(
    ("text", "exclude", "message"),
    [
        ("pillow==1.0", [], r"of pillow is installed, not pillow==1.0; pip install 'pillow==1.0'"),
        ("no-such-package", [], "no-such-package is not installed here; pip install 'no-such-package'"),
        ("-r base.txt", [], "'-r base.txt' does not name a package, such as pillow>=9"),
        ("pillow", ["pilow"], "--exclude pilow: no such package is installed; see pip list"),
        ("pillow", ["ringspark"], "the archive needs ringspark"),
    ],
)
def test_wrong_packages_are_refused(text: str, exclude: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        choose_distributions(requirements(tmp_path, text), exclude)


def test_an_output_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "there.tgz").touch()
    for name, message in {
        "environment.zip": r"must end in \.tar\.gz or \.tgz",
        "there.tgz": "exists; remove it",
        "nowhere/environment.tgz": "nowhere does not exist; create it first",
    }.items():
        with pytest.raises(ValueError, match=message):
            pack(tmp_path / name)


EDITABLE = {"RECORD": "", "direct_url.json": '{"dir_info": {"editable": true}}'}


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (EDITABLE, "mine is installed in editable"),
        ({}, "mine has no list of its files, because pip did not install it; --exclude mine"),
    ],
)
def test_packages_whose_files_are_elsewhere(files: dict[str, str], message: str, tmp_path: Path) -> None:
    folder = tmp_path / "mine-1.0.dist-info"
    folder.mkdir()
    for name, text in {"METADATA": "Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n", **files}.items():
        (folder / name).write_text(text)
    with pytest.raises(ValueError, match=message):
        list_files(Distribution.at(folder))


def test_files_of_tests_are_left_out_unless_a_package_imports_them() -> None:
    for name, expected in {
        "numpy/_core/tests/_natype.py": True,  # imported by numpy.testing
        "numpy/_core/tests/test_dtype.py": False,
        "numpy/testing/test_overrides.py": True,
        "torch/test/Dict_test": False,
        "torch/bin/protoc": True,
        "torch/__pycache__/x.cpython-311.pyc": False,
    }.items():
        assert is_packed(PurePosixPath(name)) == expected, name


def test_a_checkout_is_packed_as_the_installed_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ringspark.egg-info").mkdir()
    (tmp_path / "ringspark.egg-info/PKG-INFO").write_text("Name: ringspark\nVersion: 0\n")
    monkeypatch.syspath_prepend(str(tmp_path))  # as a build leaves it in a checkout
    files = list_files(choose_distributions(None, [])["ringspark"])
    for name in ("__init__.py", "jobs/command.py", "extras/packing/trial.py"):
        assert f"ringspark/{name}" in files
    assert not [path for path in files if "ringspark/ringspark" in path or "__editable__" in path]
    assert any(path.endswith(".dist-info/METADATA") for path in files)


def test_equal_files_make_equal_archives(tmp_path: Path) -> None:
    for name, seconds in {"one": 1, "two": 1_700_000_000}.items():
        folder = tmp_path / name
        folder.mkdir()
        (folder / "python3.11").write_bytes(b"program" * 3_000_000)  # several members of the gzip file
        (folder / "python3.11").chmod(0o700 if seconds > 1 else 0o755)
        (folder / "python").symlink_to("python3.11")
        (folder / "module.py").symlink_to(f"../{name}/python3.11")
        files = {f"bin/{name}": folder / name for name in ("python3.11", "python")}
        files["lib/module.py"] = folder / "module.py"
        write_archive(tmp_path / f"{name}.tgz", dict(sorted(files.items(), reverse=seconds > 1)))
    first = (tmp_path / "one.tgz").read_bytes()
    assert first == (tmp_path / "two.tgz").read_bytes()
    assert gzip.decompress(first).count(b"program") == 6_000_000
    with tarfile.open(tmp_path / "one.tgz") as archive:
        assert archive.getmember("bin/python").linkname == "python3.11"
        assert archive.getmember("lib/module.py").isfile()
        assert archive.getmember("bin/python3.11").mode == 0o755


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("archive")
    file = requirements(folder, "")
    done = run_ringspark("pack", "--requirement", file, cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "it trained one rank with Python 3." in done.stdout
    assert "libstdc++, tar and gzip; they need no Python" in done.stdout
    assert "--archives environment.tar.gz#environment" in done.stdout
    assert [path.name for path in folder.iterdir() if path != file] == ["environment.tar.gz"]
    return folder / "environment.tar.gz"


@pytest.mark.slow
def test_an_archive_that_lacks_a_package_is_not_kept(tmp_path: Path) -> None:
    left_out = ["numpy", "sympy", "networkx", "torchmetrics"]
    message = "a training in it fails: ModuleNotFoundError: No module named 'numpy'"
    with pytest.raises(ValueError, match=message):
        pack(tmp_path / "small.tgz", requirements(tmp_path, ""), left_out)
    assert [path.name for path in tmp_path.iterdir()] == ["requirements.txt"]


@pytest.fixture(scope="module")
def cluster(archive: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkHosts]:
    """Workers on two hosts, which see neither this environment, its Python, nor the checkout."""
    folder = tmp_path_factory.mktemp("cluster")
    with Network(num_hosts=2) as network, SparkHosts(network, folder, archive=archive) as running:
        yield running


on_hosts = pytest.mark.skipif(bool(refusal()), reason=f"no hosts here: {refusal()}")


@pytest.mark.spark
@pytest.mark.slow
@on_hosts
def test_executors_without_python_train_from_the_archive(cluster: SparkHosts, tmp_path: Path) -> None:
    places, fit = cluster.results(cluster.drive({"collective": "torch"}, places=True))
    for host, place in zip(cluster.network.hosts, places["places"], strict=True):
        name, python, torch, ringspark, has_environment = place
        unpacked = python.removesuffix("/bin/python")
        assert (name, has_environment) == (host.name, "False")
        assert unpacked.startswith(f"{cluster.folder}/work-{name}/")
        assert torch.startswith(unpacked)
        assert ringspark.startswith(unpacked)
    assert (fit["rows"], fit["restarts"]) == (4000, [])

    options = {"conf": {"spark.master": "local[2]"}, "fits": [{"storageUri": str(tmp_path / "local")}]}
    local = [sys.executable, str(HERE / "driver.py"), json.dumps(options)]
    done = subprocess.run(local, env=spark_environment(), cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (expected,) = json.loads(done.stdout.splitlines()[-1])
    assert fit["predictions"] == pytest.approx(expected["predictions"], abs=1e-6)
