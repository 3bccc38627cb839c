"""Find out by trying what works on this machine and in this job."""

from syncline.doctor.checkup import Checkup, Finding, examine

__all__ = ["Checkup", "Finding", "examine"]
