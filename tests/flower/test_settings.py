"""Settings: where each comes from, and what is said of one that cannot be."""

import dataclasses
import inspect
import json
from pathlib import Path

import networkx as nx
import pytest
from flwr.app import MetricRecord
from flwr.serverapp.strategy import FedAvg

from flwr_decentral.core import ConfigurationError
from flwr_decentral.core.layout import PRIVATE_BY_DEFAULT
from flwr_decentral.flower.settings import FedAvgOptions, Settings, find_in_app, resolve
from flwr_decentral.plugins import make
from flwr_decentral.sim.scenario import Compute, Network, Scenario


def settings(run_config=None, **arguments) -> Settings:
    return resolve("local", run_config, arguments).settings


# --- precedence -----------------------------------------------------------------------------------

SOURCES = [
    # (setting, what the run-config says, what the argument says)
    ("topology", "ring", "complete"),
    ("seed", 3, 4),
    ("duration", 1.5, 2.5),
    ("evaluate_every", 2, 3),
    ("results_dir", "there", "here"),
    ("dispatch", "message", "packed"),
    ("transcript", True, False),
    ("private_keys", "a,b", ("c",)),
    ("frozen_keys", "a, b", ("c",)),
    ("setup_timeout", 10.0, 20.0),
    ("real_time", True, False),
    ("segment", 10.0, 20.0),
    ("fetch_average", True, False),
    ("resume", "one", "two"),
]


def test_every_setting_is_covered_here():
    assert {name for name, _, _ in SOURCES} | {"scenario"} == {
        entry.name for entry in dataclasses.fields(Settings)
    }


@pytest.mark.parametrize(("name", "configured", "argument"), SOURCES)
def test_an_argument_wins_over_the_run_config_and_that_over_the_default(name, configured, argument):
    config = {name.replace("_", "-"): configured}
    read = ("a", "b") if name.endswith("keys") else configured
    assert getattr(settings(), name) == getattr(Settings(), name)
    assert getattr(settings(config), name) == read != getattr(Settings(), name)
    assert getattr(settings(config, **{name: argument}), name) == argument
    assert settings({name.replace("_", "-"): ""}) == Settings()


def test_zero_asks_for_the_default_except_of_the_seed():
    config = {"duration": 0.0, "evaluate-every": 0, "setup-timeout": 0, "transcript": False}
    assert settings(config) == Settings()
    assert settings({"seed": 0}).seed == 0


def test_an_app_may_have_keys_of_its_own():
    assert settings({"learning-rate": 0.1, "num-server-rounds": 3}) == Settings()


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("topology", 3, "str"),
        ("seed", 1.5, "int"),
        ("seed", True, "int"),
        ("duration", "long", "int or float"),
        ("duration", True, "int or float"),
        ("evaluate-every", 1.0, "int"),
        ("evaluate-every", True, "int"),
        ("dispatch", True, "str"),
        ("transcript", "yes", "bool"),
        ("transcript", 1, "bool"),
        ("private-keys", 1, "str"),
    ],
)
def test_a_run_config_of_the_wrong_type_is_refused_by_its_key(key, value, expected):
    with pytest.raises(ConfigurationError, match=f"run-config {key} must be {expected}, got "):
        settings({key: value})


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"dispatch": "packet"}, "did you mean 'packed'"),
        ({"duration": -1.0}, "duration must be positive and finite, got -1.0 s"),
        ({"evaluate_every": -1}, "evaluate_every counts rounds"),
    ],
)
def test_a_value_out_of_range_is_refused(arguments, complaint):
    with pytest.raises(ConfigurationError, match=complaint):
        settings(**arguments)
    key, value = next(iter(arguments.items()))
    with pytest.raises(ConfigurationError, match=complaint):
        settings({key.replace("_", "-"): value})


# --- patterns -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "patterns"),
    [
        ("*.bias", ("*.bias",)),
        (" *.bias , head.* ,", ("*.bias", "head.*")),
        ("none", ()),
        (" none ", ()),
        (["a", "b"], ("a", "b")),
        (("a",), ("a",)),
        ([], ()),
    ],
)
def test_patterns_are_a_list_or_a_text_with_commas(value, patterns):
    assert settings(private_keys=value).private_keys == patterns
    assert settings(frozen_keys=value).frozen_keys == patterns
    if isinstance(value, str):
        assert settings({"private-keys": value}).private_keys == patterns


def test_running_statistics_are_private_by_default():
    assert settings().private_keys == PRIVATE_BY_DEFAULT
    assert settings().frozen_keys == ()


# --- names ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("algorithm", "name", "nearest"),
    [
        ("divshare", "fragment", "fragments"),
        ("divshare", "evaluate_evry", "evaluate_every"),
        ("divshare", "fraction_fit", "fraction_train"),
        (make("divshare"), "topologie", "topology"),
    ],
)
def test_an_unknown_argument_is_refused_with_the_nearest_known(algorithm, name, nearest):
    with pytest.raises(ConfigurationError, match=f"unknown argument '{name}'.*mean '{nearest}'"):
        resolve(algorithm, None, {name: 1})


def test_an_algorithm_that_has_been_made_takes_no_hyper_parameters():
    with pytest.raises(ConfigurationError, match="has been given its hyper-parameters already"):
        resolve(make("divshare"), None, {"fragments": 2})
    assert resolve(make("divshare", fragments=2), None, {}).algorithm.fragments == 2


def test_an_unknown_algorithm_is_refused_with_what_is_installed():
    with pytest.raises(ConfigurationError, match="did you mean 'divshare'.*Installed are: .*dpsgd"):
        resolve("divshar", None, {})


# --- hyper-parameters -----------------------------------------------------------------------------


def test_hyper_parameters_come_from_arguments_and_from_the_table_of_the_algorithm():
    config = {"divshare.fragments": 5, "divshare.degree": 3, "dpsgd.patience": 1.0}
    assert resolve("divshare", config, {}).algorithm == make("divshare", fragments=5, degree=3)
    assert resolve("divshare", config, {"degree": 2}).algorithm.degree == 2
    assert resolve("dpsgd", config, {}).algorithm.patience == 1.0


def test_kebab_case_and_empty_texts_in_the_table():
    config = {"dpsgd.order": "combine-then-adapt", "dpsgd.average": "", "dpsgd.patience": 3}
    assert resolve("dpsgd", config, {}).algorithm == make(
        "dpsgd", order="combine-then-adapt", patience=3.0
    )


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        ({"divshare.fragment": 5}, "'fragment'; did you mean 'fragments'"),
        ({"divshare.fragments": "many"}, "'fragments' must be int"),
        ({"divshare.fragments": True}, "'fragments' must be int"),
    ],
)
def test_a_bad_hyper_parameter_in_the_table_is_refused(config, complaint):
    with pytest.raises(ConfigurationError, match=complaint):
        resolve("divshare", config, {})


# --- the scenario ---------------------------------------------------------------------------------

TABLES = {
    "network.uplink": "10 Mbit/s",
    "network.latency": "5 ms",
    "network.loss": 0.1,
    "compute.seconds": 0.5,
    "compute.stragglers": 0.25,
    "compute.slowdown": 4.0,
}


def test_a_scenario_comes_from_the_tables_of_the_run_config():
    assert resolve("local", TABLES, {}).scenario == Scenario(
        network=Network(uplink="10 Mbit/s", latency="5 ms", loss=0.1),
        compute=Compute(seconds=0.5, stragglers=0.25, slowdown=4.0),
    )


def test_a_given_scenario_takes_the_place_of_the_tables():
    scenario = Scenario(compute=Compute(seconds=2.0))
    assert resolve("local", TABLES, {"scenario": scenario}).scenario == scenario


def test_an_unknown_key_in_a_table_is_refused_with_the_nearest_known():
    with pytest.raises(ConfigurationError, match="'uplnk' in network; did you mean 'uplink'"):
        resolve("local", {"network.uplnk": 1e6}, {})


@pytest.fixture
def app_folder(tmp_path, monkeypatch):
    """A folder on the import path, but not the working directory: where Flower unpacks an app."""
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    folder = tmp_path / "app"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    return folder


def test_a_table_may_name_a_json_file_of_the_app(app_folder):
    (app_folder / "factors.json").write_text(json.dumps([1.0, 2.0]))
    config = {"compute.factors": "factors.json"}
    assert resolve("local", config, {}).scenario.compute.factors == (1.0, 2.0)


def test_a_scenario_may_be_a_toml_file_of_the_app(app_folder):
    (app_folder / "slow.toml").write_text('[compute]\ntrace = "trace.json"\n')
    (app_folder / "trace.json").write_text("[[1.0], [2.0]]")
    expected = Scenario(compute=Compute(trace=((1.0,), (2.0,))))
    assert resolve("local", {"scenario": "slow.toml"}, {}).scenario == expected
    assert resolve("local", None, {"scenario": Path("slow.toml")}).scenario == expected


def test_a_file_that_is_not_in_the_bundle_is_named(app_folder):
    with pytest.raises(ConfigurationError, match=r"missing\.json.*fab-include"):
        resolve("local", {"compute.factors": "missing.json"}, {})


@pytest.mark.parametrize(
    "arguments",
    [
        {"duration": "5 s"},
        {"duration": float("nan")},
        {"duration": float("inf")},
        {"fraction_evaluate": "1"},
        {"evaluate_every": "2"},
        {"evaluate_every": 2.5},
        {"seed": "1"},
        {"seed": 1.5},
        {"seed": True},
        {"scenario": {}},
        {"private_keys": None},
        {"frozen_keys": [1]},
        {"transcript": "yes"},
        {"min_train_nodes": "2"},
        {"train_metrics_aggr_fn": 3},
        {"setup_timeout": -1},
        {"segment": 0},
        {"segment": float("inf")},
        {"resume": 3},
        {"fetch_average": 1},
    ],
    ids=str,
)
def test_an_argument_of_another_type_is_refused_by_name(arguments):
    with pytest.raises(ConfigurationError, match=f"{next(iter(arguments))}|keys"):
        resolve("local", None, arguments)


@pytest.mark.parametrize("algorithm", [None, 3, dict], ids=str)
def test_what_is_no_algorithm_is_refused(algorithm):
    with pytest.raises(ConfigurationError, match="an algorithm is a name"):
        resolve(algorithm, None, {})


def test_the_app_comes_before_the_working_directory(app_folder):
    (Path.cwd() / "a.json").write_text("[]")
    assert find_in_app("a.json") == Path.cwd() / "a.json"
    (app_folder / "a.json").write_text("[]")
    assert find_in_app("a.json") == app_folder / "a.json"
    assert find_in_app(app_folder / "a.json") == app_folder / "a.json"
    assert find_in_app("nowhere.json") == Path("nowhere.json")


def test_a_topology_may_be_a_graph(app_folder):
    graph = nx.path_graph(3)
    assert settings(topology=graph).topology is graph


# --- FedAvg's arguments ---------------------------------------------------------------------------


def test_all_arguments_of_fedavg_are_known_with_its_defaults():
    theirs = inspect.signature(FedAvg).parameters
    ours = {entry.name: entry.default for entry in dataclasses.fields(FedAvgOptions)}
    assert set(ours) == set(theirs)
    differing = {name for name, known in theirs.items() if known.default != ours[name]}
    # FedAvg wants two nodes where one will do here.
    assert differing == {"min_train_nodes", "min_evaluate_nodes", "min_available_nodes"}


def test_arguments_of_fedavg_are_honored():
    def aggregate(contents, key):
        del contents, key
        return MetricRecord()

    given = {
        "fraction_train": 1.0,
        "fraction_evaluate": 0.5,
        "min_train_nodes": 2,
        "min_evaluate_nodes": 3,
        "min_available_nodes": 4,
        "weighted_by_key": "weight",
        "arrayrecord_key": "model",
        "configrecord_key": "settings",
        "train_metrics_aggr_fn": aggregate,
        "evaluate_metrics_aggr_fn": aggregate,
    }
    assert resolve("local", None, given).options == FedAvgOptions(**given)
    assert set(given) == {entry.name for entry in dataclasses.fields(FedAvgOptions)}


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"fraction_train": 0.5}, r"fraction_train=0\.5 cannot be honored.*outages"),
        ({"fraction_evaluate": 1.5}, r"fraction_evaluate must be in \[0, 1\], got 1\.5"),
        ({"fraction_evaluate": -0.1}, r"fraction_evaluate must be in \[0, 1\], got -0\.1"),
    ],
)
def test_what_cannot_be_honored_is_refused_by_name(arguments, complaint):
    with pytest.raises(ConfigurationError, match=complaint):
        resolve("local", None, arguments)
