"""The reports, files and curves of a plan."""

from darts_parallel.report.explanation import explain as explain
from darts_parallel.report.plan_json import plan_dict as plan_dict
from darts_parallel.report.text import render as render
