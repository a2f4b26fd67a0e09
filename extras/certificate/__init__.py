"""Certificates: a signed hash chain over a training, and replays of its intervals that check the chain.

Each name is imported when it is first used, so that `ringspark --help` loads no torch.
"""

from typing import TYPE_CHECKING

from ringspark.lazy_names import export_lazily

if TYPE_CHECKING:
    from ringspark.extras.certificate.certificate import Certificate as Certificate
    from ringspark.extras.certificate.certificate import certify as certify
    from ringspark.extras.certificate.verification import Verification as Verification
    from ringspark.extras.certificate.verification import verify_run as verify_run

__getattr__, __dir__, __all__ = export_lazily(__name__)
