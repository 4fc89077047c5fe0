"""Run inside an environment: is every pinned package there, at its version, with all its files?

    python -I installed_check.py REQUIREMENTS.txt ...

Prints one JSON list of strings: what is wrong, empty when nothing is.
"""

from __future__ import annotations

import json
import os
import sys
from importlib import metadata

from pip._vendor.packaging.requirements import Requirement


def problems_of(line: str) -> str | None:
    """What is wrong with the package that one requirement line pins, or None."""
    requirement = Requirement(line)
    if requirement.marker is not None and not requirement.marker.evaluate():
        return None
    try:
        distribution = metadata.distribution(requirement.name)
    except metadata.PackageNotFoundError:
        return f"{requirement.name} is missing"
    version = distribution.version
    if not version or not requirement.specifier.contains(version, prereleases=True):
        return f"{requirement.name} is {version or 'damaged'} instead of {str(requirement.specifier).lstrip('=')}"
    if distribution.files is None:
        return f"{requirement.name} has no list of files"
    for file in distribution.files:
        # compiled files come and go with the interpreter's settings
        if file.suffix != ".pyc" and not os.path.exists(distribution.locate_file(file)):
            return f"{requirement.name} has lost {file}"
    return None


def main() -> None:
    """See the module."""
    lines: list[str] = []
    for path in sys.argv[1:]:
        with open(path, encoding="utf-8") as file:
            lines += [line.partition(" #")[0].strip() for line in file]
    found = (problems_of(line) for line in lines if line and not line.startswith("#"))
    print(json.dumps([problem for problem in found if problem]))


if __name__ == "__main__":
    main()
