"""Where the files that a run reads lie."""

from importlib.util import find_spec
from pathlib import Path

SHIPPED = Path(__file__).resolve().parents[1] / "shipped"  # the models that come with the package
PACKAGE = "package:"


def place_of(path: str) -> str:
    """A path as it is; `shipped:NAME` is a file or folder that comes with specbench, `package:NAME/FILE` a file of an
    installed Python package, which is not imported."""
    if path.startswith(PACKAGE):
        name, _, file = path.removeprefix(PACKAGE).partition("/")
        found = find_spec(name) if name.isidentifier() else None
        folders = found and found.submodule_search_locations
        return str(Path(folders[0], file)) if folders else path
    return str(SHIPPED / path.removeprefix("shipped:")) if path.startswith("shipped:") else path
