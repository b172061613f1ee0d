"""Read what a user may write: schema, composition, and one sentence for what cannot be."""

from darts_parallel.config.composition import load_config as load_config
from darts_parallel.config.messages import error_sentence as error_sentence
from darts_parallel.config.schema import Config as Config
from darts_parallel.config.schema import config_dir as config_dir
from darts_parallel.config.schema import register_schema as register_schema
