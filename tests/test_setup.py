"""`scripts/setup_environment.py` as the Makefile runs it; only pip and the build are fakes."""

import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

# `ringspark build-horovod` is a command of extras.
pytestmark = [pytest.mark.extras, pytest.mark.telling]
ROOT = Path(__file__).resolve().parent.parent
SCRIPT = "scripts/setup_environment.py"
HOROVOD_BUILD = "extras/commands/build_horovod.py"
LOCK = "requirements/lock.txt"
FLOOR = "requirements/floor.txt"
LAYERS = {".venv-floor": FLOOR} | {
    f".venv-peers-{name}": f"requirements/peers_{name}.txt" for name in ("horovod", "xgboost")
}

# Replaces `.venv/bin/python`: records pip commands and answers like pip.
FAKE_PYTHON = """#!{python}
import os, pathlib, sys, tarfile
here = pathlib.Path(__file__).resolve().parent
args = sys.argv[1:]
if args[0] == "-c":
    if "version_info" in args[1]: print(*sys.version_info[:2])
    if "importlib.metadata" in args[1]: print("2.13.0+cpu", end="")
    if "torch.version.cuda" in args[1]: print("12.6" if (here / "torch_has_cuda").exists() else "")
    if "horovod.torch" in args[1]: sys.exit((here / "unimportable").exists())
    sys.exit()
quiet = ("--quiet", "--disable-pip-version-check", "--no-input")
words = [arg for arg in args[2:] if arg not in quiet]
if words[0] == "--python": here, words = pathlib.Path(words[1]).parent, words[2:]
with open(here / "calls", "a") as calls: print(*words, file=calls)
if words[0] == "download":
    folder = pathlib.Path(words[words.index("--dest") + 1])
    folder.mkdir(parents=True, exist_ok=True)
    source = here / "horovod-0.28.1"
    with tarfile.open(folder / "horovod-0.28.1.tar.gz", "w:gz") as packed: packed.add(source, source.name)
if words[0] == "wheel":
    sources = pathlib.Path(words[-1])
    for name in ("CMakeLists.txt", "horovod/torch/CMakeLists.txt", "horovod/__init__.py"):
        (here / "edited").open("a").write((sources / name).read_text())
    (here / "env").write_text(str({{k: v for k, v in os.environ.items() if k[:7] in ("HOROVOD", "MAKEFLA")}}))
    if (here / "broken").exists(): print("no compiler likes this"); sys.exit(1)
    folder = pathlib.Path(words[words.index("--wheel-dir") + 1])
    folder.mkdir()
    (folder / "horovod-0.28.1-cp311-cp311-linux_x86_64.whl").write_text("wheel")
"""

CMAKE = 'set(CMAKE_CXX_STANDARD 14)\nstring(REPLACE "-O2" "-O3" CMAKE_CXX_FLAGS_RELWITHDEBINFO)\n'
# The files of Horovod that the build edits.
SOURCES = {
    "CMakeLists.txt": CMAKE,
    "horovod/torch/CMakeLists.txt": CMAKE,
    "horovod/common/gloo/gloo_context.cc": (
        "  auto dev = CreateDevice(device_attr);\n\n  global_ctx = global_context.ctx;\n"
    ),
    "horovod/common/parameter_manager.cc": (
        "  } else {\n    Eigen::VectorXd v = TunableParameter::BestValue();\n"
    ),
    "cmake/Modules/FindPytorch.cmake": "(CUDA_HOME is not None)",
    "horovod/__init__.py": "__version__ = '0.28.1'",
}


def tools_without(folder: Path, *missing: str) -> str:
    """Returns a PATH whose only folder links to all programs on the real PATH except `missing`."""
    folder.mkdir()
    for place in os.environ["PATH"].split(os.pathsep):
        for tool in Path(place).iterdir() if Path(place).is_dir() else ():
            if tool.name not in missing and not (folder / tool.name).is_symlink():
                (folder / tool.name).symlink_to(tool)
    return str(folder)


def fake_tool(folder: Path, name: str, script: str) -> None:
    """Puts a shell script before the real program with this name."""
    (folder / name).unlink(missing_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)


def environment(**changes: str) -> dict[str, str]:
    """Returns the environment without variables that the script reads, updated with `changes`."""
    steering = {"CXX", "JAVA_HOME", "HOROVOD_CMAKE", "RINGSPARK_REQUIRE_HOROVOD", "CUDA_HOME"}
    steering |= {"HOROVOD_GPU_OPERATIONS", "HOROVOD_CUDA_HOME", "HOROVOD_NCCL_HOME"}
    return {key: value for key, value in os.environ.items() if key not in steering} | changes


def run_script(root: Path, *arguments: str, env: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(root / SCRIPT), *arguments]
    return subprocess.run(
        command, env=env, cwd=root, capture_output=True, text=True, stdin=subprocess.DEVNULL
    )


def test_complete_machine_passes() -> None:
    done = run_script(ROOT, "--check", env=environment())
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_every_missing_tool_is_named_at_once(tmp_path: Path) -> None:
    path = tools_without(tmp_path / "bin", "java", "c++", "g++")
    done = run_script(ROOT, "--check", env=environment(PATH=path))
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        "Java 17 or 21 is missing: apt-get install openjdk-17-jre-headless",
        "A C++17 compiler is missing (Horovod is compiled with it): apt-get install g++",
    ]


@pytest.mark.parametrize(
    ("tool", "script", "part"),
    [
        ("java", """echo 'openjdk version "11.0.2"' >&2""", "this is Java 11"),
        ("java", """echo 'java version "1.8.0_392"' >&2""", "this is Java 8"),
        ("java", """echo 'openjdk version "25" 2025-09-16' >&2""", "this is Java 25"),
        (
            "java",
            """[ $# = 1 ] && echo 'openjdk version "17.0.1"' >&2""",
            "module jdk.incubator.vector is missing",
        ),
        ("java", "exit 1", "Java 17 or 21 is missing: apt-get"),
        ("cmake", "echo cmake version 3.5.1", "cmake 3.13 or newer is missing"),
    ],
)
def test_unfit_tool_is_named(tool: str, script: str, part: str, tmp_path: Path) -> None:
    path = tools_without(tmp_path / "bin")
    fake_tool(tmp_path / "bin", tool, script)
    done = run_script(ROOT, "--check", env=environment(PATH=path))
    assert part in done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert done.returncode == (0 if tool == "cmake" else 1)


def test_compiler_without_cpp17_is_named(tmp_path: Path) -> None:
    path = tools_without(tmp_path / "bin")
    for name in ("c++", "g++"):
        fake_tool(tmp_path / "bin", name, 'case "$*" in *c++17*) exit 1;; esac')
    done = run_script(ROOT, "--check", env=environment(PATH=path))
    assert done.returncode == 1
    assert done.stderr == "The C++ compiler c++ does not compile C++17: apt-get install g++\n"


def test_java_home_goes_before_path(tmp_path: Path) -> None:
    done = run_script(ROOT, "--check", env=environment(JAVA_HOME=str(tmp_path)))
    assert done.returncode == 1
    assert f"JAVA_HOME is {tmp_path}" in done.stderr


def test_other_python_is_named() -> None:
    code = (
        "import sys; sys.path.insert(0, 'scripts'); sys.version_info = (3, 9, 2, 'final', 0);"
        "import setup_environment; sys.exit(setup_environment.main(['--check']))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    said = "Python 3.11 is missing (this is 3.9.2): apt-get install python3.11 python3.11-venv\n"
    assert done.stderr == said


@dataclass
class Checkout:
    """A copy of the files that the setup reads, with a fake Python environment."""

    root: Path
    cache: Path
    name: str = ".venv"

    @property
    def bin(self) -> Path:
        return self.root / self.name / "bin"

    @property
    def sources(self) -> Path:
        return self.bin / "horovod-0.28.1"

    @property
    def packages(self) -> Path:
        return self.root / self.name / "lib" / "python3.11" / "site-packages"

    def set_up(self, **env: str) -> subprocess.CompletedProcess[str]:
        options = [self.name.replace(".venv-", "--")] if self.name != ".venv" else []
        return run_script(self.root, *options, env=self.environment(**env))

    def environment(self, **env: str) -> dict[str, str]:
        # Fake Java and compiler that answer at once; other tests use the real ones.
        path = f"{self.root / 'tools'}{os.pathsep}{os.environ['PATH']}"
        return environment(XDG_CACHE_HOME=str(self.cache), **{"PATH": path} | env)

    def calls(self) -> list[str]:
        """Returns the pip commands since the last call, without the option that all of ours have."""
        file = self.bin / "calls"
        lines = file.read_text().splitlines() if file.exists() else []
        file.unlink(missing_ok=True)
        return [line.removesuffix(" --no-compile") for line in lines]

    def stamp(self) -> dict[str, str]:
        return json.loads((self.root / self.name / ".ringspark-setup").read_text())


PACKAGES = ("pipelines", "models", "estimators", "extras", "jobs")


def make_checkout(root: Path, cache: Path) -> Checkout:
    requirements = [f"requirements/{path.name}" for path in ROOT.glob("requirements/*")]
    for source in (SCRIPT, HOROVOD_BUILD, "pyproject.toml", *requirements):
        (root / source).parent.mkdir(parents=True, exist_ok=True)
        (root / source).write_bytes((ROOT / source).read_bytes())
    for folder in (*PACKAGES, "ringspark", "tools"):
        (root / folder).mkdir(exist_ok=True)
    (root / "ringspark" / "__init__.py").touch()
    fake_tool(root / "tools", "java", """echo 'openjdk version "17.0.1"' >&2""")
    fake_tool(root / "tools", "c++", "exit 0")
    return with_stand_in(Checkout(root, cache))


def with_stand_in(checkout: Checkout) -> Checkout:
    """Puts the fake Python where the environment's Python would be."""
    checkout.bin.mkdir(parents=True)
    checkout.packages.mkdir(parents=True)
    (checkout.bin / "python").write_text(FAKE_PYTHON.format(python=sys.executable))
    (checkout.bin / "python").chmod(0o755)
    for name, text in SOURCES.items():
        (checkout.sources / name).parent.mkdir(parents=True, exist_ok=True)
        (checkout.sources / name).write_text(text)
    return checkout


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return make_checkout(tmp_path / "checkout", tmp_path / "cache")


def test_the_command_builds_the_version_that_is_pinned() -> None:
    from ringspark.extras.commands import build_horovod

    pinned = (ROOT / "requirements" / "horovod.txt").read_text()
    assert f"\nhorovod=={build_horovod.VERSION}\n" in pinned


def test_set_up_installs_in_order(checkout: Checkout) -> None:
    done = checkout.set_up()
    assert done.returncode == 0, done.stderr
    calls = checkout.calls()
    assert calls[0].startswith("install torch==2.13.0 numpy packaging setuptools wheel --constraint ")
    # Horovod is built while the other packages are installed.
    build = [call for call in calls if call.startswith(("download", "wheel"))]
    assert [call.split()[0] for call in build] == ["download", "wheel"]
    rest = [call for call in calls[1:] if call not in build]
    assert rest[0].startswith("install --requirement ")
    assert rest[0].endswith("lock.txt")
    assert rest[1].startswith("install --no-deps -r ")
    assert rest[1].endswith("no_deps.txt")
    assert rest[2] == f"install --no-deps --no-build-isolation --editable {checkout.root}"
    assert rest[3].endswith(
        "/horovod-0.28.1+iface.cycle-torch-2.13.0+cpu-cp311/horovod-0.28.1-cp311-cp311-linux_x86_64.whl"
    )
    edited = (checkout.bin / "edited").read_text()
    assert edited.count("set(CMAKE_CXX_STANDARD 17)\n") == 2
    assert 'string(REPLACE "-O2 -g" "-O3" CMAKE_CXX_FLAGS_RELWITHDEBINFO)' in edited
    assert edited.endswith("__version__ = '0.28.1+iface.cycle'")
    built_with = (checkout.bin / "env").read_text()
    for setting in ("WITH_PYTORCH", "WITH_GLOO", "WITHOUT_MPI", "WITHOUT_TENSORFLOW", "WITHOUT_MXNET"):
        assert f"'HOROVOD_{setting}': '1'" in built_with
    links = {path.name: path.resolve() for path in (checkout.root / ".dev" / "ringspark").iterdir()}
    files = {"__init__.py": checkout.root / "ringspark" / "__init__.py"}
    assert links == {name: checkout.root / name for name in PACKAGES} | files


@pytest.mark.parametrize(("torch", "standard"), [("2.13.0+cpu", 17), ("2.14.1", 20), ("3.0.0", 20)])
def test_horovod_is_compiled_by_the_standard_of_torch(checkout: Checkout, torch: str, standard: int) -> None:
    from ringspark.extras.commands import build_horovod

    build_horovod.edit_sources(checkout.sources, torch)
    assert f"CMAKE_CXX_STANDARD {standard}" in (checkout.sources / "horovod/torch/CMakeLists.txt").read_text()


def test_second_run_does_nothing(checkout: Checkout, tmp_path: Path) -> None:
    checkout.set_up()
    before = checkout.stamp()
    checkout.calls()
    # The script does not even check the tools.
    done = checkout.set_up(PATH=tools_without(tmp_path / "bin", "java", "c++", "g++"))
    assert done.returncode == 0
    assert done.stdout == "set-up: .venv is up to date\n"
    assert checkout.calls() == []
    assert checkout.stamp() == before


def test_only_what_pinned_packages_require_stays(checkout: Checkout) -> None:
    pinned = re.findall(r"^([\w.-]+)==", (checkout.root / LOCK).read_text(), flags=re.MULTILINE)
    requires: dict[str, tuple[str, ...]] = dict.fromkeys((*pinned, "pip", "setuptools", "ringspark"), ())
    # torch's default build requires CUDA packages by extras; no lock file names them.
    requires["torch"] = ('Cuda.Kit[run]==13.*; sys_platform == "linux"', 'off_linux; sys_platform == "win32"')
    requires["numpy"] = ('of_an_extra; extra == "plot"',)
    requires |= {"cuda_kit": ('cuda_run; extra == "run"', 'cuda_math; extra == "math"')}
    requires |= {"Cuda_Run": ("cuda-kit", "deep"), "stray_a": ("stray_b",), "stray_b": ("stray_a",)}
    requires |= dict.fromkeys(("deep", "off_linux", "of_an_extra", "cuda_math", "~umpy"), ())
    for name, needs in requires.items():
        folder = checkout.packages / f"{name.replace('-', '_')}-1.0.dist-info"
        folder.mkdir(exist_ok=True)
        (folder / "METADATA").write_text("".join(f"Requires-Dist: {need}\n" for need in needs))
        (folder / "RECORD").touch()
    assert checkout.set_up().returncode == 0
    (removed,) = [call for call in checkout.calls() if "uninstall" in call]
    assert removed == "uninstall --yes cuda-math of-an-extra off-linux stray-a stray-b"


def test_interrupted_run_is_finished_by_the_next(checkout: Checkout) -> None:
    checkout.set_up()
    (checkout.root / ".venv" / ".ringspark-setup").write_text('{"inputs": "cut o')
    cut_off, whole = (checkout.packages / f"{name}-1.0.dist-info" for name in ("half", "numpy"))
    for metadata in (cut_off, whole):
        metadata.mkdir(parents=True)
    (whole / "RECORD").touch()
    checkout.calls()
    assert checkout.set_up().returncode == 0
    assert len(checkout.calls()) == 5
    assert not cut_off.exists(), "pip would take the half-installed package for installed"
    assert whole.exists()


def test_wheel_is_built_once_for_all_checkouts(checkout: Checkout, tmp_path: Path) -> None:
    checkout.set_up()
    other = make_checkout(tmp_path / "other", checkout.cache)
    assert other.set_up().returncode == 0
    assert "wheel" not in [call.split()[0] for call in other.calls()]


def test_cache_lies_in_home_without_xdg(checkout: Checkout, tmp_path: Path) -> None:
    env = environment(HOME=str(tmp_path / "home"), XDG_CACHE_HOME="")
    assert run_script(checkout.root, env=env).returncode == 0
    folders = list((tmp_path / "home" / ".cache" / "ringspark" / "wheels").iterdir())
    assert [folder.name for folder in folders] == ["horovod-0.28.1+iface.cycle-torch-2.13.0+cpu-cp311"]


@pytest.mark.parametrize(
    ("lacks", "env", "nccl"),
    [
        ("", {}, True),
        ("nccl.h", {}, False),
        pytest.param("CUDA_HOME", {}, False, marks=pytest.mark.slow),
        pytest.param("torch_has_cuda", {}, False, marks=pytest.mark.slow),
        pytest.param("", {"HOROVOD_GPU_OPERATIONS": ""}, False, marks=pytest.mark.slow),
    ],
)
def test_horovod_is_built_with_nccl_where_cuda_is(checkout, tmp_path, lacks, env, nccl):
    """The wheel differs from the wheel of machines without CUDA."""
    home = tmp_path / "cuda"
    for part in ("bin", "include"):
        (home / part).mkdir(parents=True)
    fake_tool(home / "bin", "nvcc", "exit 0")
    if lacks != "nccl.h":
        (home / "include" / "nccl.h").touch()
    if lacks != "torch_has_cuda":
        (checkout.bin / "torch_has_cuda").touch()
    path = f"{checkout.root / 'tools'}{os.pathsep}{tools_without(tmp_path / 'bin', 'nvcc')}"
    home_set = {} if lacks == "CUDA_HOME" else {"CUDA_HOME": str(home)}
    done = checkout.set_up(**{"PATH": path} | home_set | env)
    assert done.returncode == 0, done.stderr
    built_with = (checkout.bin / "env").read_text()
    assert ("'HOROVOD_GPU_OPERATIONS': 'NCCL'" in built_with) == nccl
    assert (f"'HOROVOD_CUDA_HOME': '{home}'" in built_with) == nccl
    wheels = [path.name for path in (checkout.cache / "ringspark" / "wheels").iterdir()]
    assert [name.endswith("-cp311-nccl") for name in wheels] == [nccl]
    assert ("libnccl-dev" in done.stdout) == (lacks == "nccl.h")


@pytest.mark.parametrize("reason", ["build", "sources", "import", "cache"])
def test_failed_horovod_is_one_line_and_no_error(reason: str, checkout: Checkout) -> None:
    if reason == "build":
        (checkout.bin / "broken").touch()
    elif reason == "sources":
        (checkout.sources / "CMakeLists.txt").write_text("set(CMAKE_CXX_STANDARD 11)\n")
    elif reason == "import":
        (checkout.bin / "unimportable").touch()
    else:
        checkout.cache.touch()  # no folder
    done = checkout.set_up()
    assert done.returncode == 0
    assert done.stderr == ""
    (line,) = [line for line in done.stdout.splitlines() if "could not be installed" in line]
    assert str(checkout.root / ".venv" / "horovod-build.log") in line
    assert "collective='torch' serves instead" in line
    checkout.calls()

    again = checkout.set_up()
    assert (again.returncode, again.stdout) == (0, f"{line}\n")
    assert checkout.calls() == []
    if reason == "build":
        assert "no compiler likes this" in (checkout.root / ".venv" / "horovod-build.log").read_text()
        assert not list(checkout.cache.rglob("horovod-*")), "a failed build must leave nothing to install"


def test_required_horovod_is_an_error_and_tried_again(checkout: Checkout) -> None:
    (checkout.bin / "broken").touch()
    checkout.set_up()
    checkout.calls()
    done = checkout.set_up(RINGSPARK_REQUIRE_HOROVOD="1")
    assert done.returncode == 1
    assert [call.split()[0] for call in checkout.calls()] == ["download", "wheel"]

    (checkout.bin / "broken").unlink()
    assert checkout.set_up(RINGSPARK_REQUIRE_HOROVOD="1").returncode == 0
    assert [call.split()[0] for call in checkout.calls()] == ["download", "wheel", "install"]
    assert checkout.set_up(RINGSPARK_REQUIRE_HOROVOD="1").stdout == "set-up: .venv is up to date\n"


def test_failed_install_is_no_traceback_and_leaves_no_stamp(checkout: Checkout) -> None:
    fails = 'case "$*" in *version_info*) echo 3 11;; *) echo "no matching distribution"; exit 1;; esac'
    fake_tool(checkout.bin, "python", fails)
    done = checkout.set_up()
    assert done.returncode == 1
    assert "no matching distribution" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (checkout.root / ".venv" / ".ringspark-setup").exists()


@pytest.fixture
def floor(checkout: Checkout) -> Checkout:
    """The same checkout for `--floor`."""
    return with_stand_in(Checkout(checkout.root, checkout.cache, ".venv-floor"))


def test_floor_is_the_environment_behind_older_packages_of_its_own(checkout, floor):
    done = floor.set_up()
    assert done.returncode == 0, done.stderr
    assert floor.calls() == [f"install --no-deps --requirement {floor.root / FLOOR}"]
    assert checkout.calls()[0].startswith("install torch==2.13.0 "), "the one that it sees comes first"
    link = floor.packages / "base.pth"
    (checkout.packages / "of_the_base.py").touch()
    code = f"import site; site.addsitedir({str(link.parent)!r}); import of_the_base"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert floor.set_up().stdout.splitlines() == [
        "set-up: .venv is up to date",
        "set-up: .venv-floor is up to date",
    ]


@pytest.mark.parametrize(
    ("changed", "concerned"),
    [
        (LOCK, {".venv", ".venv-floor"}),
        (SCRIPT, {".venv", ".venv-floor"}),
        (FLOOR, {".venv-floor"}),
        *(
            pytest.param(name, {".venv", ".venv-floor"}, marks=pytest.mark.slow)
            for name in ("requirements/no_deps.txt", "requirements/horovod.txt", "pyproject.toml")
        ),
    ],
)
def test_changed_input_runs_its_own_environments(changed, concerned, checkout, floor):
    environments = (checkout, floor)
    for each in environments:
        each.set_up()
        each.calls()
    with (checkout.root / changed).open("a") as file:
        file.write("\n# changed\n")
    for each in environments:
        assert each.set_up().returncode == 0
    ran = {each.name: [call.split()[0] for call in each.calls()] for each in environments}
    # The wheel is in the cache, so the script checks everything and builds nothing.
    assert ran[".venv"] == ["install"] * (5 if ".venv" in concerned else 0)
    assert {name for name, calls in ran.items() if calls} == concerned
    assert checkout.set_up().stdout == "set-up: .venv is up to date\n"


def test_peers_are_set_up_beside_the_floor_each_by_its_own_pins(checkout: Checkout) -> None:
    layers = [with_stand_in(Checkout(checkout.root, checkout.cache, name)) for name in LAYERS]
    done = run_script(checkout.root, "--peers", env=checkout.environment())
    assert done.returncode == 0, done.stderr
    for layer in layers:
        assert layer.calls() == [f"install --no-deps --requirement {layer.root / LAYERS[layer.name]}"]
    with (checkout.root / LAYERS[".venv-peers-horovod"]).open("a") as file:
        file.write("\n# changed\n")
    run_script(checkout.root, "--peers", env=checkout.environment())
    assert [layer.name for layer in layers if layer.calls()] == [".venv-peers-horovod"]


def pins(file: Path) -> dict[str, str]:
    """Returns the versions that a requirements file pins, by package name."""
    return dict(re.findall(r"^([\w.-]+)==(\S+)$", file.read_text(), flags=re.M))


def test_the_floor_runs_the_lower_bounds() -> None:
    """Each pin of the floor is the oldest release line that pyproject.toml allows."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    admitted = [*project["dependencies"], *project["optional-dependencies"]["petastorm"]]
    bounds = dict(requirement.split(">=") for requirement in admitted)
    floor = pins(ROOT / FLOOR)
    # The oldest Spark and the oldest pandas need these two.
    assert set(floor) - set(bounds) == {"py4j", "pytz"}
    for name in set(floor) & set(bounds):
        assert f"{floor[name]}.".startswith(f"{bounds[name]}."), name


@pytest.mark.slow
def test_the_command_builds_the_wheel_for_other_hosts(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "ringspark.jobs.command", "build-horovod", "--no-install"]
    command += ["--output", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, stdin=subprocess.DEVNULL)
    (wheel,) = tmp_path.glob("horovod-0.28.1+iface.cycle-*.whl")
    assert done.stdout.splitlines()[-1] == f"wheel: {wheel}"
