"""Writes the software bill of materials of a wheel, in CycloneDX JSON.

    python tools/sbom.py dist/lossops-*.whl lossops.cdx.json

The wheel has to be installed: its library says which CUDA runtime was linked into it, and that is
all that the wheel has of others. torch is a dependency and not part of the wheel. Needs
cyclonedx-python-lib[json-validation].
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import zipfile
from pathlib import Path

from cyclonedx.model import HashAlgorithm, HashType
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentScope, ComponentType
from cyclonedx.model.license import DisjunctiveLicense
from cyclonedx.output.json import JsonV1Dot6
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from packageurl import PackageURL


def bom_of(wheel: Path) -> Bom:
    command = [sys.executable, "-m", "lossops.info", "--json"]
    report = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    with zipfile.ZipFile(wheel) as archive:
        library = hashlib.sha256(archive.read("lossops/_C.so")).hexdigest()
    if library != report["library_sha256"]:
        raise SystemExit(f"{wheel.name} is not the wheel that is installed")

    version, cuda = report["lossops"], report["build"]["cuda"]
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    package = Component(
        type=ComponentType.LIBRARY,
        name="lossops",
        version=version,
        purl=PackageURL("pypi", None, "lossops", version, {"file_name": wheel.name}),
        bom_ref=f"lossops@{version}",
        licenses=[DisjunctiveLicense(id="BSD-3-Clause")],
        hashes=[HashType(alg=HashAlgorithm.SHA_256, content=digest)],
    )
    torch = Component(
        type=ComponentType.LIBRARY,
        name="torch",
        purl=PackageURL("pypi", None, "torch"),
        bom_ref="torch",
        scope=ComponentScope.EXCLUDED,
        description="not in the wheel; 2.10 or newer is installed beside it",
    )
    parts = [torch]
    if cuda is not None:
        runtime = Component(
            type=ComponentType.LIBRARY,
            name="cuda-cudart-static",
            version=cuda,
            purl=PackageURL("generic", "nvidia", "cuda-cudart-static", cuda),
            bom_ref=f"cuda-cudart-static@{cuda}",
            licenses=[DisjunctiveLicense(name="NVIDIA CUDA Toolkit EULA")],
            description="the CUDA runtime, linked statically into lossops/_C.so",
        )
        parts.append(runtime)
    bom = Bom(components=parts)
    bom.metadata.component = package
    bom.register_dependency(package, parts)
    return bom


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("wheel", type=Path)
    parser.add_argument("output", type=Path)
    arguments = parser.parse_args()
    text = JsonV1Dot6(bom_of(arguments.wheel)).output_as_string(indent=2)
    error = JsonStrictValidator(SchemaVersion.V1_6).validate_str(text)
    if error is not None:
        print(f"not valid CycloneDX 1.6: {error}", file=sys.stderr)
        return 1
    arguments.output.write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
