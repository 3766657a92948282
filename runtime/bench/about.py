"""What a benchmark was of: bundle, machine, settings."""

from __future__ import annotations

import os
import platform
from pathlib import Path

from graphspec import __version__
from graphspec.manifest import Manifest

_CPUS = Path("/proc/cpuinfo")


def about_bundle(manifest: Manifest) -> dict[str, str]:
    """Names and values to print."""
    backend = manifest.backend
    return {
        "architecture": manifest.architecture,
        "bundle": f"{manifest.key[:12]}, {manifest.encoding}, {manifest.num_draft_tokens} drafts a step",
        "backend": f"{backend.name} {backend.version}, {backend.device_class}",
    }


def about_machine() -> dict[str, str]:
    """Likewise."""
    load = f", load {os.getloadavg()[0]:.1f} at the start" if hasattr(os, "getloadavg") else ""
    return {
        "machine": f"{_processor()}, {os.cpu_count()} CPUs{load}",
        "software": f"graphspec {__version__}, Python {platform.python_version()}",
    }


def _processor() -> str:
    if _CPUS.is_file():
        for line in _CPUS.read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()
