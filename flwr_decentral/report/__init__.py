"""Results of runs: values, files and tables."""

from .results import Count, Evaluation, RunResult, Spread, Traffic, lower_is_better
from .tables import table

__all__ = ["Count", "Evaluation", "RunResult", "Spread", "Traffic", "lower_is_better", "table"]
