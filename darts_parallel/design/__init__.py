"""The best use of a budget: figures of hardware for the shortest iteration, and a bound that proves it."""

from darts_parallel.design.figures import FIGURES as FIGURES
from darts_parallel.design.figures import scaled_config as scaled_config
from darts_parallel.design.products import upgrades as upgrades
from darts_parallel.design.request import Design as Design
from darts_parallel.design.request import design_of as design_of
from darts_parallel.design.request import read_design as read_design
from darts_parallel.design.search import Answer as Answer
from darts_parallel.design.search import Designer as Designer
