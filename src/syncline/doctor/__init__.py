"""Find out by trying what works on this machine and in this job, and read the failure reports of a job."""

from syncline.doctor.checkup import Checkup, Finding, examine
from syncline.doctor.postmortem import Accused, Postmortem, examine_reports, unfinished_runs

__all__ = ["Accused", "Checkup", "Finding", "Postmortem", "examine", "examine_reports", "unfinished_runs"]
