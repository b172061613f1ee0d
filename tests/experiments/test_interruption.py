from dataclasses import replace

import pytest

from darts_parallel import load_problem, search
from experiments.comparison.interruption import unless_interrupted


def test_ctrl_c_in_a_search_ends_the_study_too() -> None:
    few = ["search.num_steps=2", "search.num_restarts=2", "search.polish=false"]
    found = search(load_problem(["model=toy", "cluster=toy", "training=toy", "space=uniform", *few]), seed=0)
    assert unless_interrupted(found) is found
    with pytest.raises(KeyboardInterrupt):
        unless_interrupted(replace(found, stopped_by="user"))
