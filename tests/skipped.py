"""At the end of a run: which tests were skipped, and what would have them run."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator

__all__ = ["summary"]

REMEDIES = {
    r"needs the command ip\b|needs the command tc\b": "apt-get install iproute2",
    r"needs the command nft\b": "apt-get install nftables",
    r"\bsshd?\b": "apt-get install openssh-client openssh-server",
    r"Slurm": "as root: apt-get install slurmctld slurmd slurm-client munge",
    r"needs root on Linux": "run the tests as root",
    r"needs (network namespaces|TAP devices)": "a kernel, or a container, that allows these",
    r"torchx": "pip install '.[torchx]'",
    r"torchstore": "pip install pygtrie; pip install --no-deps torchstore",
    r"'torch'|needs torch|\btorch\b": "pip install '.[torch]'",
    r"NIXL is not installed": "pip install '.[rdma]'",
    r"'cryptography'|needs cryptography": "pip install '.[tls]'",
    r"opentelemetry": "pip install '.[telemetry]'",
    r"'numpy'": "pip install numpy",
    r"matplotlib|sklearn|rich": "pip install '.[examples]'",
    r"mkdocs": "pip install '.[docs]'",
    r"'hatchling'": "pip install '.[dev]'",
}
"""By a pattern of the reason, what a person can do about it. Others are listed as they are."""


def summary(reasons: Iterable[str]) -> Iterator[str]:
    """One line for each reason, the most frequent first: how many tests, why, and the remedy."""
    counts = Counter(reason.removeprefix("Skipped: ") for reason in reasons)
    if not counts:
        return
    yield f"{counts.total()} tests were skipped here:"
    for reason, count in counts.most_common():
        remedy = next((it for words, it in REMEDIES.items() if re.search(words, reason)), None)
        yield f"{count:6}  {reason}" + (f"  ->  {remedy}" if remedy else "")
