"""Flower's Simulation Runtime without Ray: a ServerApp and a ClientApp run in this process.

Messages, node ids, contexts and queues are Flower's own. Only the backend is ours: instead of an
actor process, a thread calls the ClientApp, with what Ray would have sent there. A run takes a
fraction of a second. This is the only file here that knows Flower's private modules.

What it hides: all "actors" share this process's modules, and with them the global generators of
``random``, numpy and torch. What one thread seeds another one draws from, so use one worker where
the client draws from a global generator. And a module that one task imports is there for all.
"""

from __future__ import annotations

import ast
import contextlib
import logging
import pickle
import queue
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.clientapp.client_app import ClientAppException
from flwr.common.constant import SUPERLINK_NODE_ID
from flwr.compat.client import run_info_store
from flwr.proto.task_pb2 import Task
from flwr.server.superlink.fleet.vce import vce_api
from flwr.server.superlink.fleet.vce.backend import Backend
from flwr.server.superlink.fleet.vce.metrics import VceMetrics
from flwr.server.superlink.linkstate import LinkStateFactory
from flwr.server.superlink.linkstate.in_memory_linkstate import RunRecord
from flwr.serverapp import Grid
from flwr.supercore.constant import FLWR_IN_MEMORY_DB_NAME, NOOP_FEDERATION_ID
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.federation import NoOpFederationManager
from flwr.superlink.grid import InMemoryGrid

_RAY_BACKEND = "flwr.server.superlink.fleet.vce.backend.raybackend"
_RUN_ID, _TASK_ID = 7, 11
_POLL, _PATIENCE = 0.002, 0.02
"""Seconds that Flower's loops wait, instead of 0.1 and 1."""
_BYTES_PER_SECOND = 1e8
"""How fast messages get to actors, also to dead ones."""


def run_in_process(
    main: Callable[[Grid], Any],
    client: ClientApp,
    nodes: int,
    *,
    workers: int = 2,
    run_config: Mapping[str, Any] | None = None,
) -> Any:
    """Call ``main`` as a ServerApp's main function; return what it returns, raise what it raises.

    Parameters
    ----------
    main : callable
        ``main(grid)``, called in this thread.
    client : ClientApp
        What each node runs.
    nodes : int
        How many nodes. They register while ``main`` is running already, as they do in Flower.
    workers : int (default: 2)
        How many messages are worked on at once; 5 at most, which is Flower's limit on one CPU.
    run_config : mapping, optional
        What clients find in ``context.run_config``.
    """
    run = Run.create_empty(run_id=_RUN_ID)
    run.primary_task_id = _TASK_ID
    run.federation_id = NOOP_FEDERATION_ID
    stop = _ImpatientEvent()
    crashes: list[BaseException] = []
    with task_identity(), _quiet(), _in_threads(workers, run_config or {}):
        factory = LinkStateFactory(
            FLWR_IN_MEMORY_DB_NAME, NoOpFederationManager(), ObjectStoreFactory()
        )
        state = factory.state()
        state.run_ids[_RUN_ID] = RunRecord(run=run)
        state.task_store[_TASK_ID] = Task(task_id=_TASK_ID, run_id=_RUN_ID)
        grid = InMemoryGrid(factory)
        grid.set_run(run)

        def serve() -> None:
            try:
                vce_api.start_vce(
                    backend_name="",
                    backend_config_json_stream="{}",
                    app_dir="",
                    is_app=False,
                    f_stop=stop,
                    run=run,
                    metrics=VceMetrics(),
                    client_app=client,
                    num_supernodes=nodes,
                    state_factory=factory,
                )
            except BaseException as crash:  # noqa: BLE001 - raised again below
                crashes.append(crash)

        runtime = threading.Thread(target=serve)
        runtime.start()
        try:
            result = main(grid)
        finally:
            stop.set()
            runtime.join()
    if crashes:
        raise crashes[0]
    return result


@contextlib.contextmanager
def task_identity() -> Iterator[None]:
    """Let Messages be made, which Flower allows in a process of a run only."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TaskIdentity, "_task_id", _TASK_ID)
        patch.setattr(TaskIdentity, "_run_id", _RUN_ID)
        patch.setattr(TaskIdentity, "_node_id", SUPERLINK_NODE_ID)
        yield


class ActorDied(BaseException):
    """What a client raises to let the actor die that runs it."""


class _ThreadBackend(Backend):
    """Call the ClientApp in the thread that asks for it.

    As in Flower's backend, actors are a stack, to which they return even if they are dead.
    """

    actors: int

    def build(self, app_fn: Callable[[], ClientApp]) -> None:
        self.app = app_fn()
        self.idle = list(range(self.actors))
        self.dead: set[int] = set()

    @property
    def num_workers(self) -> int:
        return self.actors

    def is_worker_idle(self) -> bool:
        return bool(self.idle)

    def terminate(self) -> None:
        pass

    def process_message(self, message: Message, context: Context) -> tuple[Message, Context]:
        actor = self.idle.pop()
        try:
            sent = pickle.dumps((message, context))
            time.sleep(len(sent) / _BYTES_PER_SECOND)
            if actor not in self.dead:
                return self._run(actor, sent)
            raise RuntimeError(f"actor {actor} is dead")
        finally:
            self.idle.append(actor)

    def _run(self, actor: int, sent: bytes) -> tuple[Message, Context]:
        message, context = pickle.loads(sent)  # noqa: S301 - of our own making
        try:
            reply = self.app(message=message, context=context)
        except ActorDied:
            self.dead.add(actor)
            raise RuntimeError(f"actor {actor} is dead") from None
        except Exception as error:
            raise ClientAppException(str(error)) from error
        return pickle.loads(pickle.dumps((reply, context)))  # noqa: S301


class _ImpatientEvent(threading.Event):
    def wait(self, timeout: float | None = None) -> bool:
        return super().wait(timeout and min(timeout, _POLL))


class _ImpatientQueue(queue.Queue):
    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        return super().get(block, timeout and min(timeout, _PATIENCE))


@contextlib.contextmanager
def _in_threads(workers: int, run_config: Mapping[str, Any]) -> Iterator[None]:
    """Put threads in the place of Ray, which Flower imports when a run starts."""
    module = types.ModuleType(_RAY_BACKEND)
    module.RayBackend = type("RayBackend", (_ThreadBackend,), {"actors": workers})
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, _RAY_BACKEND, module)
        patch.setattr(vce_api, "Queue", _ImpatientQueue)
        # Flower reads it from the app's bundle, which there is none of.
        patch.setattr(run_info_store, "get_fused_config", lambda _: dict(run_config))
        # numpy uses it for an array's header, a traceback for its marks, and Python 3.11 cannot
        # do it in two threads at once.
        patch.setattr(ast, "parse", _one_at_a_time(ast.parse))
        yield


def _one_at_a_time(function: Callable[..., Any]) -> Callable[..., Any]:
    lock = threading.Lock()

    def locked(*arguments: Any, **keywords: Any) -> Any:
        with lock:
            return function(*arguments, **keywords)

    return locked


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Let Flower's log go to the root logger, where pytest captures it, and nowhere else."""
    logger = logging.getLogger("flwr")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logger, "handlers", [])
        patch.setattr(logger, "propagate", True)
        yield
