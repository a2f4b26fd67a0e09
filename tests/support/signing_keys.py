"""Writes a pair of EC keys."""

from pathlib import Path

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat


def write_keys(folder: Path) -> tuple[Path, Path]:
    """Writes a private and a public key as PEM files; returns their paths."""
    key = ec.generate_private_key(ec.SECP256R1())
    private, public = folder / "private.pem", folder / "public.pem"
    private.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    public.write_bytes(key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    return private, public
