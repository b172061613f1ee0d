"""The reports, files and curves of a plan."""

from darts_parallel.report.curves import SearchCurves as SearchCurves
from darts_parallel.report.curves import Weights as Weights
from darts_parallel.report.ending import render_ending as render_ending
from darts_parallel.report.ending import render_ladder as render_ladder
from darts_parallel.report.ending import shown_path as shown_path
from darts_parallel.report.explanation import memory_table as memory_table
from darts_parallel.report.format import fits_label as fits_label
from darts_parallel.report.format import one_line as one_line
from darts_parallel.report.format import percent as percent
from darts_parallel.report.format import print_line as print_line
from darts_parallel.report.format import seconds as seconds
from darts_parallel.report.format import table_of as table_of
from darts_parallel.report.html import report_page as report_page
from darts_parallel.report.outcome import Outcome as Outcome
from darts_parallel.report.plan_json import plan_dict as plan_dict
from darts_parallel.report.screen import headline as headline
from darts_parallel.report.screen import render as render
from darts_parallel.report.tables import csv_of as csv_of
from darts_parallel.report.tables import csv_text as csv_text
from darts_parallel.report.tables import filled_table as filled_table
from darts_parallel.report.tables import markdown_table as markdown_table
from darts_parallel.report.tensorboard import RESULTS as RESULTS
from darts_parallel.report.tensorboard import Tracker as Tracker
from darts_parallel.report.tensorboard import override_values as override_values
from darts_parallel.report.text import claim as claim
from darts_parallel.report.text import report_tables as report_tables
