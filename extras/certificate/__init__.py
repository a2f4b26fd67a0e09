"""Certificates: a signed hash chain over a training, and replays of its intervals that check the chain.

Each name is imported when it is first used, so that `ringspark --help` loads no torch.
"""

from typing import TYPE_CHECKING

from ringspark.estimators.lazy_imports import make_getattr

if TYPE_CHECKING:
    from ringspark.extras.certificate.certificate import Certificate, certify
    from ringspark.extras.certificate.verification import Verification, verify_run

_PATHS = {
    "Certificate": "ringspark.extras.certificate.certificate:Certificate",
    "Verification": "ringspark.extras.certificate.verification:Verification",
    "certify": "ringspark.extras.certificate.certificate:certify",
    "verify_run": "ringspark.extras.certificate.verification:verify_run",
}

__all__ = ["Certificate", "Verification", "certify", "verify_run"]


__getattr__ = make_getattr(__name__, _PATHS)


def __dir__() -> list[str]:
    return __all__
