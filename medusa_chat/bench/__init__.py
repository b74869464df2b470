"""bench: what Medusa brings on this machine, as ratios from one run, and what was not measured."""

from medusa_chat.bench.bar_chart import chart_svg
from medusa_chat.bench.harness.report_data import Report
from medusa_chat.bench.harness.rows import table
from medusa_chat.bench.html_report import report_html
from medusa_chat.bench.run import FINDINGS, STUDIES, run, run_shape
from medusa_chat.bench.studies.report import model_answers
