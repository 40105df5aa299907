"""Certificates of one day, made by openssl."""

import subprocess

import pytest


def certificate_of(folder, name, *options):
    """(key, certificate) of a host. options: of `openssl req`, in place of -nodes."""
    key, certificate = folder / f"{name}-key.pem", folder / f"{name}-cert.pem"
    of_one_day = ["-x509", "-newkey", "rsa:2048", "-days", "1", "-subj", f"/CN={name}"]
    command = [
        "openssl",
        "req",
        *of_one_day,
        *(options or ["-nodes"]),
        "-keyout",
        key,
        "-out",
        certificate,
    ]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("openssl is not installed")
    return key, certificate
