"""Learning rates, step by step."""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
import transformers

from longspan.recipes import find
from longspan.train.recipe import Optimizer, Phase
from longspan.train.schedule import learning_rate

PHASES = (
    Phase(steps=10, length=8, batch=1, learning_rate=1.0, warmup=4),
    Phase(steps=6, length=8, batch=1, learning_rate=0.5, warmup=2),
)


def rates(**settings):
    recipe = replace(find("tiny"), phases=PHASES, optimizer=Optimizer(**settings))
    return [learning_rate(recipe, step) for step in range(recipe.steps)]


def test_constant():
    wanted = [0.25, 0.5, 0.75, 1.0, *[1.0] * 6, 0.25, 0.5, *[0.5] * 4]
    assert rates(schedule="constant") == wanted


def test_linear_falls_in_every_phase():
    found = rates(schedule="linear", final=0.1)
    assert found[3] == found[4] == 1.0
    assert found[9] == pytest.approx(0.1 + 0.9 / 6)
    assert found[15] == pytest.approx(0.5 * (0.1 + 0.9 / 4))
    assert found[4] - found[5] == pytest.approx(0.9 / 6)


@pytest.mark.parametrize("schedule", ["linear", "cosine", "polynomial"])
@pytest.mark.parametrize("over", ["phase", "run"])
def test_no_step_is_wasted(schedule, over):
    """Not even the only one of a run."""
    assert min(rates(schedule=schedule, over=over)) > 0
    alone = Phase(steps=1, length=8, batch=1, learning_rate=1.0)
    recipe = replace(find("tiny"), phases=(alone,), optimizer=Optimizer(schedule=schedule))
    assert learning_rate(recipe, 0) == 1.0


@pytest.mark.parametrize(
    ("schedule", "theirs"),
    [
        ("linear", transformers.get_linear_schedule_with_warmup),
        ("cosine", transformers.get_cosine_schedule_with_warmup),
        (
            "polynomial",
            partial(transformers.get_polynomial_decay_schedule_with_warmup, lr_end=0.0, power=3.0),
        ),
    ],
)
def test_they_fall_as_those_of_transformers(schedule, theirs):
    """Behind warm-up, in which those begin with a step of 0."""
    made = theirs(torch.optim.SGD([torch.zeros(1)], lr=1.0), 4, 10)
    wanted = [made.lr_lambdas[0](step) for step in range(4, 10)]
    assert rates(schedule=schedule)[4:10] == pytest.approx(wanted)


def test_polynomial_is_linear_to_a_power():
    straight, bent = rates(schedule="linear"), rates(schedule="polynomial", power=2.0)
    assert bent[:4] == straight[:4]
    assert bent[4:10] == pytest.approx([rate**2 for rate in straight[4:10]])
    assert bent[9] == pytest.approx(1 / 36)


def test_cosine_over_the_run():
    found = rates(schedule="cosine", over="run")
    assert found[4] == 1.0
    assert found[12] == pytest.approx(0.5 * (1 + math.cos(math.pi * 8 / 12)) / 2)
    assert found[10] < found[11] < found[9]  # warm-up of the second phase leads to where it goes on
    assert rates(schedule="cosine")[7] == pytest.approx(0.5)


def test_longformer_halves_it():
    recipe = find("enwik8-small")
    ends = [sum(p.steps for p in recipe.phases[: n + 1]) - 1 for n in range(5)]
    assert [learning_rate(recipe, end) for end in ends] == [
        2.5e-4,
        1.25e-4,
        6.25e-5,
        3.125e-5,
        1.5625e-5,
    ]
    assert learning_rate(recipe, 0) == pytest.approx(2.5e-4 / 10_000)
    assert recipe.phases[4].warmup == 500


def test_rsqrt_falls_with_the_root_of_the_steps():
    found = rates(schedule="rsqrt")
    assert found[:4] == [0.25, 0.5, 0.75, 1.0]
    assert found[7] == pytest.approx((4 / 8) ** 0.5)
    assert found[15] == pytest.approx(0.5 * (2 / 6) ** 0.5)  # each phase counts its own
