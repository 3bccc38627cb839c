"""What this machine, and the job that started this process, can do: looked at and tried, never assumed."""

from syncline.doctor.checkup import Checkup, Finding, examine

__all__ = ["Checkup", "Finding", "examine"]
