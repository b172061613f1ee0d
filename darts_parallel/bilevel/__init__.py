"""The bilevel loop: search a plan while a small Transformer trains.

Exact parallelism does not change the loss. Three things do couple a plan with training, and this
package is built on them: lossy communication, the batch size, and the measured speed of learning.
"""

from typing import TYPE_CHECKING

from darts_parallel.bilevel.data import Corpus as Corpus
from darts_parallel.bilevel.data import load_corpus as load_corpus
from darts_parallel.bilevel.job import REFERENCE as REFERENCE
from darts_parallel.bilevel.job import SCHEDULE as SCHEDULE
from darts_parallel.bilevel.job import BilevelJob as BilevelJob
from darts_parallel.bilevel.job import compared as compared
from darts_parallel.bilevel.job import judged as judged
from darts_parallel.bilevel.job import times as times
from darts_parallel.bilevel.loop import BilevelLoop as BilevelLoop
from darts_parallel.bilevel.loop import TrainingPhase as TrainingPhase
from darts_parallel.bilevel.settings import BilevelSettings as BilevelSettings
from darts_parallel.bilevel.space import BatchPlan as BatchPlan
from darts_parallel.bilevel.space import LogSlowdown as LogSlowdown
from darts_parallel.errors import lazy_names

if TYPE_CHECKING:
    from darts_parallel.bilevel.operators import train_operators as train_operators

__getattr__, __dir__ = lazy_names(__name__)
