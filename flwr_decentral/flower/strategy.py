"""The ServerApp side: what takes the place of ``FedAvg(...)``.

The ServerApp calls the roll, keeps virtual time and collects metrics. It never sends or receives a
parameter of the model: the initial model goes into shared memory, and so does everything after it.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from logging import INFO, WARNING
from pathlib import Path
from typing import IO, Any, Final

from flwr.app import ArrayRecord, ConfigRecord
from flwr.common.logger import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result

from flwr_decentral.arena import Arena
from flwr_decentral.core import Algorithm, ConfigurationError, DecentralError, Seeds, from_seconds
from flwr_decentral.core.conduct import check_fit
from flwr_decentral.core.layout import Layout
from flwr_decentral.core.topology import build as build_topology
from flwr_decentral.core.topology import describe as describe_topology
from flwr_decentral.localsocket import Listener
from flwr_decentral.ops import choose
from flwr_decentral.plugins import installed
from flwr_decentral.report.results import RunResult
from flwr_decentral.sim.conditions import Conditions
from flwr_decentral.sim.engine import Engine
from flwr_decentral.sim.journal import Journal
from flwr_decentral.sim.parts import Network
from flwr_decentral.sim.plan import Plan
from flwr_decentral.sim.scenario import Scenario

from .account import Account, Prepared, check_folder, free_name
from .control import Job
from .dispatch import Dispatcher, MessageDispatcher
from .evaluation import EvaluateFn, Watcher
from .grid import GridMeter
from .ledger import Ledger
from .mission import Mission
from .outcome import SIDECAR, lead
from .packed import PackedDispatcher
from .records import to_numpy
from .roster import Roster, call_roll
from .settings import FedAvgOptions, Resolved, Settings, find_in_app, resolve

_EVALUATIONS: Final = 10
"""How many evaluations a run has where nothing is said."""


def decentral(
    algorithm: str | Algorithm, *, run_config: Mapping[str, Any] | None = None, **arguments: Any
) -> Decentral:
    """Train without a server that holds the model.

    Takes the place of ``FedAvg(...)`` in a ServerApp. The ClientApp needs
    :func:`~flwr_decentral.flower.mod.decentral_mod`.

    Parameters
    ----------
    algorithm : str or Algorithm
        The name of an installed algorithm (``flwr-decentral list`` shows them), ``"module:Class"``
        for one in your own app, or an algorithm that has been made already.
    run_config : mapping, optional
        ``context.run_config``: settings in kebab case, scenario keys under ``network.`` and
        ``compute.``, hyper-parameters under the algorithm's name. Arguments win.
    **arguments
        Settings (see :class:`~flwr_decentral.flower.settings.Settings`), FedAvg's keyword
        arguments (see :class:`~flwr_decentral.flower.settings.FedAvgOptions`), and the algorithm's
        hyper-parameters.

    Returns
    -------
    Decentral
        What has ``summary()`` and ``start(...)``, as Flower's strategies do.

    Raises
    ------
    ConfigurationError
        If anything is unknown, refused or out of range; it says what would be right.

    Examples
    --------
    ::

        strategy = decentral("divshare", fragments=10, degree=6, topology="complete")
        result = strategy.start(grid=grid, initial_arrays=arrays, num_rounds=50)
    """
    return Decentral(resolve(algorithm, run_config, arguments))


@dataclass
class DecentralResult(Result):
    """Flower's result, and what only a decentralized run has.

    Attributes
    ----------
    run : RunResult, optional
        Per-node metrics, traffic, consensus distance and the digest.
    files : list of Path
        Where it was written.
    """

    run: RunResult | None = None
    files: list[Path] = field(default_factory=list)


class Decentral:
    """A decentralized run, ready to start. Made by :func:`decentral`.

    Attributes
    ----------
    algorithm : Algorithm
        What each node runs.
    settings : Settings
        Topology, seed, evaluation and so on.
    options : FedAvgOptions
        What FedAvg would have been given.
    scenario : Scenario
        Network, compute times, outages.
    """

    def __init__(self, resolved: Resolved) -> None:
        self.algorithm = resolved.algorithm
        self.settings: Settings = resolved.settings
        self.options: FedAvgOptions = resolved.options
        self.scenario = resolved.scenario

    def summary(self) -> None:
        """Log the configuration."""
        settings, options = self.settings, self.options
        log(INFO, "\t├──> Algorithm: %s", self.algorithm)
        if self.algorithm.paper:
            log(INFO, "\t│\t└── Paper: %s", self.algorithm.paper)
        log(INFO, "\t├──> Topology: %s", self._topology_spec())
        log(INFO, "\t├──> Scenario:")
        for section, values in self.scenario.to_mapping().items():
            log(INFO, "\t│\t├── %s: %s", section, values or "default")
        log(INFO, "\t│\t└── seed: %d", settings.seed)
        log(INFO, "\t├──> Evaluation:")
        every = settings.evaluate_every or "automatic"
        log(INFO, "\t│\t├── Every (rounds): %s", every)
        log(INFO, "\t│\t└── Fraction of nodes: %.2f", options.fraction_evaluate)
        log(INFO, "\t└──> Keys in records:")
        log(INFO, "\t\t├── Weighted by: '%s'", options.weighted_by_key)
        log(INFO, "\t\t├── ArrayRecord key: '%s'", options.arrayrecord_key)
        log(INFO, "\t\t└── ConfigRecord key: '%s'", options.configrecord_key)

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: EvaluateFn | None = None,
    ) -> DecentralResult:
        """Run.

        Parameters
        ----------
        grid : Grid
            Flower's grid.
        initial_arrays : ArrayRecord
            The model that all nodes start from.
        num_rounds : int (default: 3)
            Local rounds of each node; not used if a duration was set.
        timeout : float (default: 3600)
            Seconds that one training or evaluation on a client may take.
        train_config, evaluate_config : ConfigRecord, optional
            What the user's functions get in their config, besides ``server-round`` (the node's
            round), ``seed`` and ``virtual-time``.
        evaluate_fn : callable, optional
            ``(round, arrays) -> MetricRecord``: evaluates the average of all models, before the
            first round and at each evaluation.

        Returns
        -------
        DecentralResult
            ``arrays`` is the average of all models; the dictionaries of metrics are Flower's.

        Raises
        ------
        DecentralError
            If the run cannot be done or fails. It says whose fault it is and what to do.
        """
        if self.settings.duration is None and num_rounds < 1:
            raise ConfigurationError(f"num_rounds must be at least 1, got {num_rounds}")
        log(INFO, "Starting decentralized training:")
        self.summary()
        check_folder(self.results_dir)
        layout, models = self._lay_out(initial_arrays)
        meter = GridMeter(grid)
        roster = call_roll(
            meter,
            at_least=max(self.options.min_available_nodes, self.options.min_train_nodes),
            patience=self.settings.setup_timeout,
            evaluation=self.options.fraction_evaluate > 0,
            real_time=self.settings.real_time,
        )
        run = self._prepare(layout, models, len(roster.node_ids), num_rounds)
        result = DecentralResult()
        evaluate = evaluate_fn and _guarded(evaluate_fn)
        if evaluate is not None and (record := evaluate(0, initial_arrays)) is not None:
            log(INFO, "Initial model: %s", dict(record))
            result.evaluate_metrics_serverapp[0] = record
        if roster.in_real_time:
            mission = self._mission(
                run, initial_arrays, timeout, train_config, evaluate_config, evaluate
            )
            self._lead(mission, meter, roster, result)
            return result
        with (
            self._dispatcher(meter, roster, run, train_config or {}, timeout) as dispatcher,
            self._transcript() as transcript,
        ):
            watcher = Watcher(
                ledger=Ledger(self.options, run.plan.seeds, len(roster.node_ids), result),
                dispatcher=dispatcher,
                layout=layout,
                evaluates=roster.evaluates,
                evaluate_config=dict(evaluate_config or {}),
                evaluate_fn=evaluate,
                rounds=run.plan.rounds,
                duration=run.plan.duration,
            )
            engine = Engine(run.plan, dispatcher, watcher, Journal(transcript))
            begin = time.monotonic()
            account = Account(
                algorithm=self.algorithm,
                settings=self.settings,
                scenario=self.scenario,
                folder=self.results_dir,
                prepared=run,
                roster=roster,
                meter=meter,
                dispatcher=dispatcher,
                watcher=watcher,
                engine=engine,
                begin=begin,
            )
            try:
                digest = engine.run()
                self._conclude(engine, watcher)
            except Exception as error:
                # What was found out until then is not lost, whoever is at fault.
                why = error if isinstance(error, DecentralError) else repr(error)
                account.write(engine.journal.digest, f"failed: {why}", transcript)
                raise
            result.run, result.files = account.write(digest, "completed", transcript)
        self._say_goodbye(result)
        return result

    # ------------------------------------------------------------------------------ before

    def _topology_spec(self) -> Any:
        return self.settings.topology or self.algorithm.default_topology

    def _lay_out(self, initial_arrays: ArrayRecord) -> tuple[Layout, Mapping[str, Any]]:
        models = to_numpy(initial_arrays)
        layout = Layout.of(
            models, private=self.settings.private_keys, frozen=self.settings.frozen_keys
        )
        if layout.rounded:
            log(WARNING, "float64 tensors are rounded to float32: %s", ", ".join(layout.rounded))
        return layout, models

    def _prepare(
        self, layout: Layout, models: Mapping[str, Any], nodes: int, num_rounds: int
    ) -> Prepared:
        """Work out everything that decides the run."""
        settings = self.settings
        seeds = Seeds(settings.seed)
        spec = self._topology_spec()
        if isinstance(spec, str) and spec.startswith("file:"):
            spec = find_in_app(spec.removeprefix("file:").strip())
        elif isinstance(spec, Path):
            spec = find_in_app(spec)
        topology = build_topology(spec, nodes, settings.seed)
        log(INFO, "Topology %s", describe_topology(topology))
        warnings = check_fit(self.algorithm, topology, layout)
        for warning in (*warnings, *self.scenario.warnings()):
            log(WARNING, "%s", warning)
        conditions = self.scenario.resolve(nodes, seeds)
        initial, private = layout.flatten(models)
        initial.flags.writeable = False
        duration = None if settings.duration is None else from_seconds(settings.duration)
        rounds = num_rounds if duration is None else None
        plan = Plan(
            algorithm=self.algorithm,
            topology=topology,
            layout=layout,
            initial=initial,
            conditions=conditions,
            seeds=seeds,
            ops=choose(),
            rounds=rounds,
            duration=duration,
            barrier_every=self._barrier_every(rounds, duration, conditions),
        )
        return Prepared(plan, private.tobytes(), topology)

    def _barrier_every(
        self, rounds: int | None, duration: int | None, conditions: Conditions
    ) -> int:
        if self.settings.evaluate_every:
            return self.settings.evaluate_every
        if rounds is None:
            nodes = range(conditions.nodes)
            mean = sum(conditions.duration_ns(node, 1) for node in nodes) / conditions.nodes
            rounds = int((duration or 0) / max(mean, 1))
        return max(1, rounds // _EVALUATIONS)

    @contextlib.contextmanager
    def _dispatcher(
        self,
        meter: GridMeter,
        roster: Roster,
        run: Prepared,
        train_config: Mapping[str, Any],
        timeout: float,
    ) -> Iterator[Dispatcher]:
        """Make arena and dispatcher, and take both down again whatever happens."""
        layout, nodes = run.plan.layout, len(roster.node_ids)
        with contextlib.ExitStack() as stack:
            arena = Arena.create(nodes, layout.size, layout.private_bytes, layout.pack())
            stack.callback(arena.close)
            for node in range(nodes):
                arena.private_input(node).data[:] = run.private
            listener = Listener()
            stack.callback(listener.close)
            job = Job(
                arena=arena.ref,
                nodes=nodes,
                arrays_key=self.options.arrayrecord_key,
                config_key=self.options.configrecord_key,
                address=listener.address,
                token=listener.token,
                patience=timeout,
            )
            common = (meter, roster, arena, job, train_config, timeout)
            dispatcher: Dispatcher
            if self.settings.dispatch == "packed":
                dispatcher = PackedDispatcher(listener, *common)
            else:
                dispatcher = MessageDispatcher(*common)
            stack.callback(dispatcher.close)
            yield dispatcher

    @contextlib.contextmanager
    def _transcript(self) -> Iterator[IO[str] | None]:
        if not self.settings.transcript:
            yield None
            return
        folder = self.results_dir
        path = folder / f"unfinished-{os.getpid()}.transcript"
        with path.open("w") as file:
            yield file
        path.unlink(missing_ok=True)

    # ------------------------------------------------------------------------------ real time

    def _mission(
        self,
        run: Prepared,
        initial_arrays: ArrayRecord,
        timeout: float,
        train_config: ConfigRecord | None,
        evaluate_config: ConfigRecord | None,
        evaluate_fn: EvaluateFn | None,
    ) -> Mission:
        """Work out what the sidecars are to be told."""
        plugin = installed().get(self.algorithm.name)
        if plugin is None:
            raise ConfigurationError(
                f"{self.algorithm.name} is not installed as a package: in a deployment the "
                "sidecars run the algorithm, so its wheel must be on every node and here"
            )
        if evaluate_fn is not None and not self.settings.fetch_average:
            log(
                WARNING,
                "evaluate_fn is called on the initial model only: no model leaves the nodes. Set "
                "fetch_average to have them send their models here to be averaged",
            )
        uplink = self.scenario.network.uplink
        if self.scenario != Scenario(network=Network(uplink=uplink)):
            log(
                WARNING,
                "Real machines are not emulated: of the scenario only network.uplink holds.",
            )
        return Mission(
            algorithm=self.algorithm,
            version=plugin.version,
            topology=run.topology,
            layout=run.plan.layout,
            initial=initial_arrays,
            settings=self.settings,
            options=self.options,
            rounds=run.plan.rounds,
            # How many rounds fit into a duration is known for emulated machines only.
            evaluate_every=run.plan.barrier_every if run.plan.rounds else 1,
            patience=timeout,
            train_config=train_config or {},
            evaluate_config=evaluate_config or {},
            evaluate_fn=evaluate_fn,
            uplinks=run.plan.conditions.uplink_bps,
        )

    def _lead(
        self, mission: Mission, meter: GridMeter, roster: Roster, result: DecentralResult
    ) -> None:
        """Lead a run in real time, and write its result."""
        outcome = lead(mission, meter, roster, result)
        result.run = outcome.result
        result.files = result.run.write(
            self.results_dir, free_name(self.results_dir, result.run.name)
        )
        if outcome.error is not None:
            raise outcome.error
        self._say_goodbye(result)

    # ------------------------------------------------------------------------------ after

    @property
    def results_dir(self) -> Path:
        """The folder that results are written to."""
        if self.settings.results_dir:
            return Path(self.settings.results_dir).expanduser()
        home = os.environ.get("FLWR_HOME") or Path.home() / ".flwr"
        return Path(home) / "decentral"

    def _conclude(self, engine: Engine, watcher: Watcher) -> None:
        """Evaluate the final models, unless that has just been done, and average them."""
        final = engine.plan.rounds or engine.rounds_done // len(engine.machines)
        evaluations = watcher.ledger.evaluations
        last = evaluations[-1] if evaluations else None
        if last is None or last.round != final or from_seconds(last.virtual_time_s) != engine.now:
            if last is not None and last.round == final:
                evaluations.pop()
            watcher.barrier(engine, final)
        watcher.ledger.finish()
        watcher.ledger.result.arrays = watcher.averaged_arrays(engine)

    def _say_goodbye(self, result: DecentralResult) -> None:
        assert result.run is not None
        log(INFO, "")
        virtual = f"{result.run.virtual_time_s:.6g} s of virtual time in "
        log(
            INFO,
            "Decentralized training finished: %s%.1f s",
            "" if result.run.dispatch == SIDECAR else virtual,
            result.run.wall_time_s,
        )
        for path in result.files:
            log(INFO, "results: %s", path)
        log(INFO, "digest: %s", result.run.digest)


def _guarded(evaluate_fn: EvaluateFn) -> EvaluateFn:
    """Check what the user's evaluate_fn returns."""

    def evaluate(round: int, arrays: ArrayRecord) -> Any:
        record = evaluate_fn(round, arrays)
        if record is not None and not hasattr(record, "items"):
            raise ConfigurationError(
                f"evaluate_fn must return a MetricRecord or None, got {type(record).__name__}"
            )
        return record

    return evaluate
