"""The best use of a budget: figures of hardware for the shortest iteration, and a bound that proves it."""

from darts_parallel.design.bound import Prices as Prices
from darts_parallel.design.figures import FIGURES as FIGURES
from darts_parallel.design.figures import overrides_of as overrides_of
from darts_parallel.design.figures import scaled as scaled
from darts_parallel.design.pricing import Pricing as Pricing
from darts_parallel.design.products import upgrades as upgrades
from darts_parallel.design.request import Design as Design
from darts_parallel.design.request import Option as Option
from darts_parallel.design.request import design_of as design_of
from darts_parallel.design.request import read_design as read_design
from darts_parallel.design.search import Answer as Answer
from darts_parallel.design.search import Designer as Designer
