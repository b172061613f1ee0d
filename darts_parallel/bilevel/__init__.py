"""The bilevel loop: search a plan while a small Transformer trains.

Exact parallelism does not change the loss. Three things do couple a plan with training, and this
package is built on them: lossy communication, the batch size, and the measured speed of learning.
"""

from typing import TYPE_CHECKING

from darts_parallel.bilevel.conclusion import BilevelPlan as BilevelPlan
from darts_parallel.bilevel.conclusion import find_learned_optimum as find_learned_optimum
from darts_parallel.bilevel.conclusion import uniform_plan as uniform_plan
from darts_parallel.bilevel.data import load_corpus as load_corpus
from darts_parallel.bilevel.jobs import Jobs as Jobs
from darts_parallel.bilevel.joint_space import FIRST_BLOCK as FIRST_BLOCK
from darts_parallel.bilevel.joint_space import JointSpace as JointSpace
from darts_parallel.bilevel.joint_space import at_bits as at_bits
from darts_parallel.bilevel.loop import BilevelSearch as BilevelSearch
from darts_parallel.bilevel.protocol import BilevelJob as BilevelJob
from darts_parallel.bilevel.protocol import Maker as Maker
from darts_parallel.bilevel.protocol import Protocol as Protocol
from darts_parallel.bilevel.protocol import SeedPlan as SeedPlan
from darts_parallel.bilevel.protocol import SeedWatcher as SeedWatcher
from darts_parallel.bilevel.report import Row as Row
from darts_parallel.bilevel.report import read_seeds as read_seeds
from darts_parallel.bilevel.report import rows_of as rows_of
from darts_parallel.bilevel.report import spread as spread
from darts_parallel.bilevel.retrain import Training as Training
from darts_parallel.bilevel.retrain import Trainings as Trainings
from darts_parallel.bilevel.settings import BilevelSettings as BilevelSettings
from darts_parallel.bilevel.settings import TransformerShape as TransformerShape
from darts_parallel.bilevel.transformer import Weights as Weights
from darts_parallel.bilevel.transformer import block as block
from darts_parallel.bilevel.transformer import initial_weights as initial_weights
from darts_parallel.errors import lazy_names

if TYPE_CHECKING:
    from darts_parallel.bilevel.operators import train_operators as train_operators

__getattr__ = lazy_names(__name__, {"operators": ("train_operators",)})
