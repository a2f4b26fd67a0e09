"""The command `ringspark`: the job of docs/jobs.md from file to report, and what it refuses."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "jobs.md"


def command(*words: str, given: str = "") -> subprocess.CompletedProcess[str]:
    """Runs the command in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "ringspark.jobs.command", *words],
        input=given,
        capture_output=True,
        text=True,
        check=False,
    )


def job_file(folder: Path) -> Path:
    """The file of docs/jobs.md, for rows in this folder."""
    (block,) = re.findall(r"^```yaml\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    file = folder / "job.yaml"
    file.write_text(block.replace("/shared/", f"{folder}/"))
    return file


@pytest.mark.slow
@pytest.mark.spark
def test_the_job_of_the_docs_trains_scores_and_is_looked_after(tmp_path: Path) -> None:
    rows = [f"{1 + i % 12},{i % 24},{i * 37 % 5000},{int(i % 24 > 12)}\n" for i in range(2400)]
    (tmp_path / "flights.csv").write_text("month,hour,distance,late\n" + "".join(rows))
    file = job_file(tmp_path)

    printed = command("train", str(file), "--print")
    assert printed.returncode == 0, printed.stderr
    again = tmp_path / "resolved.yaml"
    again.write_text(printed.stdout)
    assert command("train", str(again), "--print").stdout == printed.stdout, "what is printed is a job again"
    planned = command("plan", str(file), "--budget", "1g")
    assert "512 rows per step on each of 2 workers" in planned.stdout, planned.stderr

    trained = command("train", str(file), "--set", "params.epochs=8", "--set", "params.learningRate=0.01")
    assert trained.returncode == 0, trained.stderr
    assert float(re.search(r"auroc ([\d.]+)", trained.stdout)[1]) > 0.9  # type: ignore[index]
    refused = command("train", str(file))
    assert refused.returncode == 2
    assert re.search(r"job.yaml, line \d+: save.model: \S+ is there; set save.overwrite", refused.stderr)

    output = str(tmp_path / "predictions")
    options = ("--option", "header=true", "--option", "inferSchema=true", "--columns", "hour,prediction")
    scored = command(
        "score", str(tmp_path / "model"), "--csv", str(tmp_path / "flights.csv"), *options, "--output", output
    )
    assert scored.returncode == 0, scored.stderr
    assert f"predictions in {output}" in scored.stdout

    store = tmp_path / "ringspark"
    (run,) = store.iterdir()
    assert run.name in command("runs", "list", str(store)).stdout
    shown = command("runs", "show", str(run)).stdout
    assert "8" in re.search(r"epochs?\D+(\d+)", shown)[1], shown  # type: ignore[index]
    page = tmp_path / "report.html"
    assert command("report", str(run), str(page)).returncode == 0
    assert "<svg" in page.read_text()
    kept = command("runs", "remove", str(run), given="n\n")
    assert run.exists(), kept.stdout
    assert command("runs", "remove", str(tmp_path), "--yes").returncode == 2, "no run, and it has our files"
    assert page.exists()
    assert command("runs", "remove", str(run), "--yes").returncode == 0
    assert not run.exists()


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        (
            "stage: TorchClassifier",
            "stage: TorchClasifier",
            r"line 1: stage .*did you mean 'TorchClassifier'",
        ),
        ("epochs: 5", "epoch: 5", r"line 14: .*'epoch'.* did you mean 'epochs'"),
        ("epochs: 5", "epochs: five", r"line 14: epochs must be a whole number, got 'five'"),
        (
            "hidden: [32, 32]",
            "layers: [32]",
            r"line 11: model 'mlp' does not take these arguments.*'hidden'",
        ),
        ("save:\n  model", "save:\n  models", r"save.models is not known to save; did you mean 'model'"),
        ("epochs: 5", "epochs: 5\n  epochs: 6", r"line 15: 'epochs' stands here twice"),
        ("csv: ", "parquet: a\n  csv: ", r"data must have one of the keys .*, got parquet and csv"),
        ("stage: ", "stage: [", r"job.yaml, line \d+: this is no YAML"),
    ],
)
def test_a_mistake_is_one_sentence_with_its_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], old: str, new: str, sentence: str
) -> None:
    from ringspark.jobs import command as ringspark

    file = job_file(tmp_path)
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new, 1))
    assert ringspark.main(["train", str(file), "--print"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(sentence, line), line


def test_a_file_in_json_is_the_same_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import yaml

    from ringspark.jobs import command as ringspark

    file = job_file(tmp_path)
    assert ringspark.main(["train", str(file), "--print"]) == 0
    expected = capsys.readouterr().out
    other = tmp_path / "job.json"
    other.write_text(json.dumps(yaml.safe_load(file.read_text())))
    assert ringspark.main(["train", str(other), "--print"]) == 0
    assert capsys.readouterr().out == expected


def test_help_and_completion_import_neither_spark_nor_torch() -> None:
    code = (
        "import sys\nfrom ringspark.jobs import command\n"
        "try:\n    command.main(sys.argv[1:])\n"
        "finally:\n    print(sorted({'torch', 'pyspark', 'numpy'} & set(sys.modules)), file=sys.stderr)"
    )
    for words in (["--help"], ["train", "--help"], ["--print-completion", "bash"]):
        done = subprocess.run(
            [sys.executable, "-c", code, *words], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0
        assert done.stderr.endswith("[]\n"), done.stderr
        assert "train" in done.stdout
