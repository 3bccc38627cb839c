"""What works on this machine and in this job, found by trying; and what the reports of a failed job say.

A new check is a function in `checks` and one line in `checks.CHECKS`.
"""

from syncline.doctor.checks import Finding
from syncline.doctor.checkup import Checkup, examine
from syncline.doctor.postmortem import Accused, Postmortem, examine_reports, unfinished_runs

__all__ = ["Accused", "Checkup", "Finding", "Postmortem", "examine", "examine_reports", "unfinished_runs"]
