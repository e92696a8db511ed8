"""The trainer that calls a function."""

import numpy as np
import pytest

from flwr_decentral.core.transcript import vector_digest
from flwr_decentral.sim.trainer import FunctionTrainer, Outcome, Task


def task(node=0, round=1):
    return Task(node=node, round=round, seed=7, at=0, due=1)


def vector(*values):
    return np.array(values, np.float32)


def test_the_function_gets_the_task_and_the_model():
    trainer = FunctionTrainer(lambda task, model: model + task.seed)
    trainer.dispatch(task(), vector(1, 2))
    outcome = trainer.wait(0)
    assert outcome.model.tolist() == [8, 9]
    assert outcome.digest == vector_digest(vector(8, 9))
    assert outcome.error == ""


def test_the_model_is_copied_as_it_is_handed_out():
    trainer = FunctionTrainer(lambda _, model: model)
    model = vector(1, 2)
    trainer.dispatch(task(), model)
    model[:] = 0
    assert trainer.wait(0).model.tolist() == [1, 2]


@pytest.mark.parametrize("kind", [np.float32, np.float64])
def test_what_was_trained_is_a_new_array_of_single_precision(kind):
    kept = np.array([1.5, 2.5], kind)
    trainer = FunctionTrainer(lambda _, __: kept)
    trainer.dispatch(task(), vector(0, 0))
    trained = trainer.wait(0).model
    assert trained.dtype == np.float32
    trained[:] = 0
    assert kept.tolist() == [1.5, 2.5]


def test_a_function_may_write_to_what_it_gets():
    def train(_, model):
        model += 1
        return model

    trainer = FunctionTrainer(train)
    model = vector(1)
    model.flags.writeable = False
    trainer.dispatch(task(), model)
    assert trainer.wait(0).model.tolist() == [2]
    assert model.tolist() == [1]


def test_a_raise_is_a_failed_training():
    def train(_, __):
        raise KeyError("label")

    trainer = FunctionTrainer(train)
    trainer.dispatch(task(), vector(1))
    assert trainer.wait(0) == Outcome(model=None, error="KeyError: 'label'")
    trainer.dispatch(task(round=2), vector(1))


def test_what_stops_the_process_is_not_caught():
    def train(_, __):
        raise KeyboardInterrupt

    trainer = FunctionTrainer(train)
    trainer.dispatch(task(), vector(1))
    with pytest.raises(KeyboardInterrupt):
        trainer.wait(0)


def test_one_task_in_flight_for_each_node():
    trainer = FunctionTrainer(lambda task, model: model + task.node)
    for node in (0, 1):
        trainer.dispatch(task(node), vector(0))
    with pytest.raises(RuntimeError, match="node 1 has a task in flight"):
        trainer.dispatch(task(1), vector(0))
    assert [trainer.wait(node).model.tolist() for node in (1, 0)] == [[1], [0]]
    with pytest.raises(KeyError):
        trainer.wait(0)


def test_what_nobody_waited_for_is_forgotten():
    calls = []
    trainer = FunctionTrainer(lambda task, _: calls.append(task))
    trainer.dispatch(task(), vector(0))
    trainer.close()
    trainer.dispatch(task(), vector(0))
    trainer.close()
    assert not calls
