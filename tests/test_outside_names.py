"""Names that programs of others read: files of studies, keys of `plan.json`, fields of a term's view.

Names of `design.json`, `graph.json`, `validation.csv`, `ranking.csv` and `replay.csv` are tested with
what writes them.
"""

import json
from dataclasses import fields
from importlib.util import find_spec

import pytest

from darts_parallel.cost.own_terms import PlanView
from tests.support.commands import TOY, Command

KEYS = {
    "": "schema model cluster training trainer pp num_micro_batches stages layers parallelism predicted "
    "search verification version config schedule trainers ladder",
    "parallelism": "dp tp pp micro_batch_size",
    "predicted": "iteration_time_s tokens_per_s mfu memory_bytes breakdown_s iteration_time_interval_s "
    "out_of_memory_probability",
    "search": "seconds steps restarts seed raw_iteration_time_s method stopped_by "
    "gradient_iteration_time_s stages",
}
"""Keys of `plan.json` by its entries."""
MEMBERS = {
    "stages": "layers ranks",
    "layers": "name tp dp zero_stage recompute sequence_parallel",
}
"""Keys of every member of a list."""
EVERY = {
    "verification": "iteration_time_s gap seconds plans_evaluated",
    "trainers": "seconds chance takes_this_plan",
}
"""Keys of every value of a mapping."""
VIEW = (
    "stage_compute_s stage_communication_s stage_device stage_node num_micro_batches device_memory_bytes "
    "sync_s stage_weights layer_weights strategies"
)
"""Fields that a function of `cost.term` may read."""
STUDIES = ("validate_cost_model", "replay_traces")


def test_a_plan_file_has_every_name_that_others_read(command: Command) -> None:
    assert command(*TOY, "output.tensorboard=false", "hydra.run.dir=one").status == 0
    written = json.loads((command.folder / "one/plan.json").read_text())
    for place, names in KEYS.items():
        assert set(names.split()) <= set(written[place] if place else written), place
    for place, names in MEMBERS.items():
        assert all(set(names.split()) <= set(one) for one in written[place]), place
    for place, names in EVERY.items():
        assert written[place]
        assert all(set(names.split()) <= set(one) for one in written[place].values()), place
    kinds = [stage["name"] for stage in written["search"]["stages"]]
    assert kinds == ["relaxed", "repaired", "fitted", "polished", "chosen"]


def test_a_term_may_read_every_field_of_its_view() -> None:
    assert set(VIEW.split()) == {own.name for own in fields(PlanView)}


@pytest.mark.parametrize("name", STUDIES)
def test_a_study_that_others_run_exists(name: str) -> None:
    assert find_spec(f"experiments.{name}") is not None
