"""Which names are URLs, how to show one without its secrets, and which hosts give away the secrets
of a machine.
"""

from __future__ import annotations

import ipaddress
import re
import socket


def is_remote(path: str) -> bool:
    """Whether a path is an address: it has a scheme."""
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]*(::|://)", path) is not None


def without_secrets(name: str) -> str:
    """A path or URL without user, password and query, which may be keys."""
    if not is_remote(name):
        return name
    return re.sub(r"://[^/?#]*@", "://", re.sub(r"[?#].*", "", name, flags=re.DOTALL))


_METADATA_NAMES = [
    "metadata.google.internal",
    "metadata.goog",
    "metadata",
    "instance-data",
    "instance-data.ec2.internal",
]
# AWS, Google Cloud, Alibaba, Azure, Oracle: beside the link-local 169.254.169.254 of them all
_METADATA_ADDRESSES = (
    "fd00:ec2::254",
    "fd20:ce::254",
    "100.100.100.200",
    "168.63.129.16",
    "192.0.0.192",
)
_NAT64 = ipaddress.ip_network("64:ff9b::/96")


def is_metadata_host(host: str) -> bool:
    """Whether a host is link-local or a cloud's metadata service, however it is spelt (decimal,
    hex, IPv4 in IPv6).
    """
    name = host.strip().strip("[]").partition("%")[0].rstrip(".").lower()
    if name in _METADATA_NAMES or name.endswith(".metadata.google.internal"):
        return True
    try:
        address: ipaddress.IPv4Address | ipaddress.IPv6Address = ipaddress.ip_address(name)
    except ValueError:
        try:
            address = ipaddress.IPv4Address(
                socket.inet_aton(name)
            )  # 0xa9fea9fe, 2852039166, 169.254.43518
        except (OSError, UnicodeError, ValueError):
            return False
    if isinstance(address, ipaddress.IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour
        if inner is None and (address in _NAT64 or int(address) < 1 << 32):
            inner = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        address = inner or address
    return address.is_link_local or str(address) in _METADATA_ADDRESSES
