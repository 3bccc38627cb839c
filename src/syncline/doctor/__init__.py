"""What this machine, and the job that started this process, can do: looked at and tried, never assumed. And what became
of a job that failed, by the notes that it left."""

from syncline.doctor.checkup import Checkup, examine
from syncline.doctor.postmortem import Accused, Postmortem, examine_notes, unfinished_runs
from syncline.doctor.trials import Finding

__all__ = ["Accused", "Checkup", "Finding", "Postmortem", "examine", "examine_notes", "unfinished_runs"]
