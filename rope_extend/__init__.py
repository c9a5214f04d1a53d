"""rope_extend: extend the context window of pretrained Llama-style models.

Each public name is imported when it is first used. So importing the package loads neither torch nor
transformers. `__init__.pyi` has the names.
After the import, transformers' auto classes can load checkpoints whose model type is "rope_extend".
"""

import re
from importlib import import_module
from pathlib import Path
from typing import Any

from rope_extend.checkpoint.auto_registration import register_when_imported

__version__ = "0.1.0"
_MODULE_OF = {
    name: module
    for module, name in re.findall(
        r"^from (\S+) import (\w+)", Path(__file__).with_suffix(".pyi").read_text("utf-8"), re.MULTILINE
    )
}
__all__ = sorted(["__version__", *_MODULE_OF])


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        from difflib import get_close_matches

        near = [] if name.startswith("_") else get_close_matches(name, _MODULE_OF, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}")
    value = globals()[name] = getattr(import_module(_MODULE_OF[name]), name)
    return value


def __dir__() -> list[str]:
    return __all__


register_when_imported()
