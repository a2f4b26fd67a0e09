"""Certificates: a signed hash chain over a training, and replays of its intervals that check the chain."""

from ringspark.extras.certificate.certificate import Certificate, certify
from ringspark.extras.certificate.verification import Verification, verify_run

__all__ = ["Certificate", "Verification", "certify", "verify_run"]
