"""Results: what a run leaves behind, and that it can be read back."""

import csv
import dataclasses
import io
import json
import math
import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from flwr_decentral.core import ConfigurationError
from flwr_decentral.report import Evaluation, RunResult, Spread, Traffic, lower_is_better, table
from flwr_decentral.sim.scenario import Network, Scenario


def evaluation(at: float = 1.5, **changes) -> Evaluation:
    fields = {
        "virtual_time_s": at,
        "round": 3,
        "metrics": {
            "accuracy": Spread.of("accuracy", [0.5, None, 1.0]),
            "loss": Spread.of("loss", [0.5, 2.0, 0.25]),
        },
        "averaged": {"accuracy": 0.875},
        "consensus_distance": 0.125,
    }
    return Evaluation(**fields | changes)


def result(**changes) -> RunResult:
    fields = {
        "algorithm": "divshare",
        "parameters": {"fragments": 10, "flush": True, "max_age": None},
        "topology": "random-regular(degree=4)",
        "scenario": Scenario(network=Network(uplink=[1e6, None, 2e6])).to_mapping(),
        "seed": 7,
        "nodes": 3,
        "rounds": 20,
        "virtual_time_s": 30.25,
        "wall_time_s": 12.5,
        "digest": "0123456789abcdef",
        "evaluations": [evaluation(0.0), evaluation()],
        "bytes": Traffic(sent=12_345_678, useful=9, wasted=8, dropped=7),
        "grid_array_bytes": 0,
        "counters": {"staleness": {"count": 4, "total": 6.0, "nbytes": 0}},
        "staleness_mean": 1.5,
        "idle_share": None,
        "train_failures": 0,
        "lost_tasks": 1,
        "layout_hash": "ff" * 16,
        "dispatch": "packed",
        "versions": {"flwr": "1.42.0"},
        "threads": 1,
        "status": "completed",
    }
    return RunResult(**fields | changes)


# --- spread ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("metric", "worst"),
    [
        ("accuracy", 1.0),
        ("val_auc", 1.0),
        ("F1", 1.0),
        ("precision", 1.0),
        ("recall", 1.0),
        ("score", 1.0),
        ("anything", 1.0),
        ("loss", 3.0),
        ("top5-error", 3.0),
        ("RMSE", 3.0),
        ("perplexity", 3.0),
    ],
)
def test_the_worst_node_depends_on_the_metric(metric, worst):
    spread = Spread.of(metric, [1.0, 3.0, 2.0])
    assert spread.worst == worst
    assert lower_is_better(metric) is (worst == 3.0)


def test_nodes_without_a_value_do_not_count():
    spread = Spread.of("accuracy", [None, np.float32(0.5), 1])
    assert spread == Spread(mean=0.75, worst=0.5, std=0.25, nodes=[None, 0.5, 1.0])
    assert math.isnan(Spread.of("accuracy", [None]).mean)
    assert math.isnan(Spread.of("accuracy", []).std)


def test_a_diverged_node_is_not_averaged_away():
    assert math.isnan(Spread.of("loss", [1.0, math.nan]).mean)
    assert math.isnan(Spread.of("loss", [1.0, math.nan]).worst)
    spread = Spread.of("loss", [1.0, math.inf])
    assert (spread.mean, spread.worst) == (math.inf, math.inf)


# --- JSON -----------------------------------------------------------------------------------------


def test_the_keys_that_readers_rely_on():
    document = json.loads(result().to_json())
    assert next(iter(document)) == "schema_version"
    assert document["schema_version"] == 1
    assert document["algorithm"] == "divshare"
    assert document["parameters"] == {"fragments": 10, "flush": True, "max_age": None}
    assert (document["seed"], document["nodes"]) == (7, 3)
    assert document["digest"] == "0123456789abcdef"
    assert document["bytes"] == {"sent": 12345678, "useful": 9, "wasted": 8, "dropped": 7}
    assert document["grid_array_bytes"] == 0
    assert document["evaluations"][1] == {
        "virtual_time_s": 1.5,
        "round": 3,
        "metrics": {
            "accuracy": {"mean": 0.75, "worst": 0.5, "std": 0.25, "nodes": [0.5, None, 1.0]},
            "loss": {
                "mean": pytest.approx(11 / 12),
                "worst": 2.0,
                "std": pytest.approx(np.std([0.5, 2.0, 0.25])),
                "nodes": [0.5, 2.0, 0.25],
            },
        },
        "averaged": {"accuracy": 0.875},
        "consensus_distance": 0.125,
    }


def test_round_trip():
    before = result(scenario=Scenario().to_mapping())
    assert RunResult.from_json(before.to_json()) == before


def test_the_scenario_of_a_result_can_be_run_again():
    after = RunResult.from_json(result().to_json())
    assert Scenario.from_mapping(after.scenario).network.uplink == (1e6, math.inf, 2e6)


floats = st.floats(allow_nan=False, allow_infinity=False)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.none() | floats, min_size=1, max_size=5), st.dictionaries(st.text(), floats))
def test_round_trip_of_any_metric(values, averaged):
    metrics = {"metric": Spread(mean=1.0, worst=2.0, std=3.0, nodes=values)}
    before = result(
        scenario={},
        evaluations=[evaluation(metrics=metrics, averaged=averaged)],
        status="gescheitert: ö",
    )
    assert RunResult.from_json(before.to_json()) == before


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, np.float64(math.nan)])
def test_what_is_not_finite_becomes_null(value):
    spread = Spread.of("loss", [1.0, value])
    before = result(
        evaluations=[
            evaluation(metrics={"loss": spread}, averaged={"loss": value}, consensus_distance=value)
        ]
    )
    text = before.to_json()
    assert "NaN" not in text
    assert "Infinity" not in text
    entry = json.loads(text)["evaluations"][0]
    assert entry["metrics"]["loss"]["nodes"] == [1.0, None]
    assert entry["averaged"] == {"loss": None}
    assert entry["consensus_distance"] is None
    after = RunResult.from_json(text).evaluations[0]
    assert math.isnan(after.consensus_distance)
    assert math.isnan(after.averaged["loss"])


def test_numbers_of_numpy_are_numbers():
    text = result(threads=np.int64(2), parameters={"rate": np.float32(0.5)}).to_json()
    assert json.loads(text)["threads"] == 2
    assert json.loads(text)["parameters"] == {"rate": 0.5}


@pytest.mark.parametrize("version", [0, 2, "1", None])
def test_other_versions_of_the_format_are_refused(version):
    document = json.loads(result().to_json()) | {"schema_version": version}
    with pytest.raises(ConfigurationError, match=f"schema_version 1 is needed, .* has {version}"):
        RunResult.from_json(json.dumps(document))


def test_what_is_no_result_is_refused():
    with pytest.raises(ConfigurationError, match="must be JSON"):
        RunResult.from_json("{")
    with pytest.raises(ConfigurationError, match="this one has None"):
        RunResult.from_json("[]")
    document = json.loads(result().to_json())
    del document["digest"]
    document["colour"] = "red"
    with pytest.raises(ConfigurationError, match="missing digest, unknown colour"):
        RunResult.from_json(json.dumps(document))
    document = json.loads(result().to_json())
    del document["evaluations"][0]["round"]
    with pytest.raises(ConfigurationError, match="missing round"):
        RunResult.from_json(json.dumps(document))


# --- files ----------------------------------------------------------------------------------------


def test_csv_has_a_row_for_each_metric_and_each_node():
    rows = list(csv.DictReader(result(evaluations=[evaluation()]).to_csv().splitlines()))
    assert [(row["metric"], row["node"], row["value"]) for row in rows[:3]] == [
        ("accuracy", "all", "0.75"),
        ("accuracy", "0", "0.5"),
        ("accuracy", "2", "1.0"),
    ]
    assert rows[0] == {
        "algorithm": "divshare",
        "seed": "7",
        "virtual_time_s": "1.5",
        "round": "3",
        "metric": "accuracy",
        "node": "all",
        "value": "0.75",
        "worst": "0.5",
        "std": "0.25",
        "averaged": "0.875",
        "consensus_distance": "0.125",
    }
    assert [row["node"] for row in rows[3:]] == ["all", "0", "1", "2"]
    assert rows[3]["averaged"] == ""


def test_csv_leaves_cells_empty_and_keeps_metrics_of_the_average_alone():
    only = evaluation(metrics={}, averaged={"loss": math.nan, "f1": 0.5})
    rows = list(csv.DictReader(result(evaluations=[only]).to_csv().splitlines()))
    assert [(row["metric"], row["value"], row["averaged"]) for row in rows] == [
        ("loss", "", ""),
        ("f1", "", "0.5"),
    ]


def test_files(tmp_path):
    run = result(scenario={})
    paths = run.write(tmp_path / "new" / "folder")
    stem = "divshare-random-regular-degree-4-n3-seed7-01234567"
    assert [path.name for path in paths] == [f"{stem}.json", f"{stem}.csv"]
    assert RunResult.from_json(paths[0].read_text()) == run
    assert paths[1].read_text() == run.to_csv()
    assert sorted(paths[0].parent.iterdir()) == sorted(paths)
    assert [path.name for path in run.write(tmp_path, name="run.1")] == ["run.1.json", "run.1.csv"]


def test_names_are_safe_file_names():
    assert result(topology="file:../a b.json", digest="").name == (
        "divshare-file-..-a-b.json-n3-seed7"
    )


def test_a_file_is_whole_or_absent(tmp_path, monkeypatch):
    run = result()
    json_path, _ = run.write(tmp_path, name="run")
    before = json_path.read_text()

    def fail(*_):
        assert json_path.read_text() == before
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        dataclasses.replace(run, seed=8).write(tmp_path, name="run")
    assert json_path.read_text() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.csv", "run.json"]


# --- table ----------------------------------------------------------------------------------------


def shown(*runs: RunResult, metric: str | None = None) -> list[str]:
    console = Console(width=140, file=io.StringIO())
    console.print(table(runs, metric))
    return console.file.getvalue().splitlines()


def test_table_compares_runs_at_their_end():
    text = shown(result(), result(algorithm="dpsgd", topology="ring", evaluations=[]))
    heading, first, second = (text[number] for number in (2, 4, 5))
    assert "mean accuracy" in heading
    assert "worst accuracy" in heading
    cells = [cell.strip() for cell in first.strip("│").split("│")]
    assert cells == [
        "divshare",
        "random-regular(degree=4)",
        "30.2 s",
        "0.750",
        "0.500",
        "12.3",
        "1.25e-01",
    ]
    assert [cell.strip() for cell in second.strip("│").split("│")][:5] == [
        "dpsgd",
        "ring",
        "30.2 s",
        "–",
        "–",
    ]


def test_table_of_another_metric_or_of_a_failed_run():
    assert "worst loss" in "\n".join(shown(result(), metric="loss"))
    assert "divshare (failed)" in "\n".join(shown(result(status="failed")))
    only_loss = evaluation(metrics={"loss": Spread.of("loss", [1.0])})
    assert "mean loss" in "\n".join(shown(result(evaluations=[only_loss])))
    assert "mean accuracy" in "\n".join(shown())
