"""Who belongs to a run, over a network: one file with a private key and certificates, which both ends of a connection show and check (mutual TLS).

The file has the key, its certificate, and those of whoever is trusted; `openssl` and etcd understand it. What `make_credentials` writes has one certificate that signs itself, so
whoever has the file belongs to the run and nobody else does. It is the user's own (mode 0600). A recipe and a run folder come from anywhere, so they never name it: the variable
`PHALANX_CREDENTIALS` does, or it lies where `phalanx service` put it, in the user's runtime folder of the same machine.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import ssl
import stat
from pathlib import Path

from phalanx.core.errors import ConfigError, Problem, RunError, not_installed
from phalanx.core.files import private_folder

VARIABLE = "PHALANX_CREDENTIALS"
DAYS = 365
"""How long a certificate is good for: longer than a run."""


def named_credentials() -> Path | None:
    """The file that the environment names, whether it is there or not."""
    given = os.environ.get(VARIABLE)
    return Path(given) if given else None


def own_credentials(port: int) -> Path:
    """Where `phalanx service` at that port of this machine leaves its credentials."""
    return private_folder() / f"credentials-{port}.pem"


def find_credentials(port: int, *, of: str = "phalanx service") -> Path:
    """The file of the run whose service, an `of`, is at `port`, checked. Raises `ConfigError` that says how to get one."""
    named = named_credentials()
    path = own_credentials(port) if named is None else named
    if named is None and not path.exists():
        rule = "is not set, and a membership service over a network is reached with the credentials of its run only"
        whose = (
            "the file that `phalanx service` names"
            if of != "etcd"
            else "a client's key and certificate, with etcd's own authority,"
        )
        hint = f"copy {whose} to this machine, and export {VARIABLE}=FILE"
        raise ConfigError.of(VARIABLE, "", rule, hint, subject="the environment")
    check_private(path)
    return path


def check_private(path: Path) -> None:
    """Raises `ConfigError` where the file is not there, not the user's own, or others could read it."""
    rule, hint = "", ""
    try:
        found = path.stat()
    except OSError as err:
        rule, hint = f"cannot be read: {err.strerror}", "name the file that `phalanx service` wrote"
    else:
        if not stat.S_ISREG(found.st_mode):
            rule, hint = "is not a file", "name the file that `phalanx service` wrote"
        elif found.st_uid not in (os.geteuid(), 0):
            rule, hint = f"belongs to user {found.st_uid}", "copy it, so that it is your own"
        elif found.st_mode & (
            0o037 if found.st_uid == 0 != os.geteuid() else 0o077
        ):  # root's, as a secret of Kubernetes is, for a group
            rule, hint = f"has mode {stat.S_IMODE(found.st_mode):04o}: others can reach it", f"chmod 600 {path}"
    if rule:
        raise ConfigError.of(VARIABLE, str(path), rule, hint, subject="the environment")


def server_context(path: Path) -> ssl.SSLContext:
    """What a service lets in: whoever shows a certificate that the file trusts. Raises `ConfigError`."""
    return _context(path, ssl.PROTOCOL_TLS_SERVER)


def client_context(path: Path) -> ssl.SSLContext:
    """What a member believes: whoever shows a certificate that the file trusts, under whatever name. Raises `ConfigError`."""
    return _context(path, ssl.PROTOCOL_TLS_CLIENT)


def _context(path: Path, side: int) -> ssl.SSLContext:
    context = ssl.SSLContext(side)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # the certificate is the run's, and not one of a machine
    context.verify_mode = ssl.CERT_REQUIRED
    try:
        context.load_cert_chain(path)
        context.load_verify_locations(path)
    except (OSError, ssl.SSLError) as err:
        rule, hint = f"has no key with certificates: {err}", "name the file that `phalanx service` wrote"
        problem = Problem(where=VARIABLE, value=str(path), rule=rule, hint=hint)
        raise ConfigError([problem], subject="the environment") from None
    return context


def make_credentials(path: Path) -> None:
    """Write a new file of mode 0600 in the place of whatever is there. Raises `ConfigError` where the package `cryptography` is missing, `RunError` where it cannot be written."""
    data = _new_credentials()
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with contextlib.suppress(FileNotFoundError):
            partial.unlink()
        fd = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with os.fdopen(fd, "wb") as file:
            file.write(data)
        partial.replace(path)
    except OSError as err:
        raise RunError(f"cannot write credentials to {path}: {err.strerror}; name another file by {VARIABLE}") from None


def _new_credentials() -> bytes:
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
    except ImportError:
        instead = f"set {VARIABLE} to a file with a key and certificates"
        problem = not_installed(VARIABLE, "", "cryptography", extra="service", instead=instead)
        raise ConfigError([problem], subject="phalanx service") from None
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "a run of phalanx")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))  # clocks of hosts differ
        .not_valid_after(now + datetime.timedelta(days=DAYS))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return private + certificate.public_bytes(pem)
