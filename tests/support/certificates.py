"""Write an authority and certificates: ``python -m support.certificates NAME …`` makes ca.pem, NAME.pem, NAME.key."""

from __future__ import annotations

import sys

import trustme


def main(names: list[str]) -> None:
    authority = trustme.CA()
    authority.cert_pem.write_to_path("ca.pem")
    for name in names:
        certificate = authority.issue_cert("localhost", "127.0.0.1", f"{name}.example")
        certificate.private_key_pem.write_to_path(f"{name}.key")
        certificate.cert_chain_pems[0].write_to_path(f"{name}.pem")


if __name__ == "__main__":
    main(sys.argv[1:])
