"""Remove outputs and run counts from notebooks, so that a commit holds what was written and not what was run.

Their metadata is what JupyterLab writes when it opens one with this project's Python, so that opening changes nothing.

``python tools/strip_notebooks.py [--check] [FILE ...]``; without files, every notebook under ``notebooks/``.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

LAB_METADATA = {
    "kernelspec": {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"},
    "language_info": {
        "codemirror_mode": {"name": "ipython", "version": 3},
        "file_extension": ".py",
        "mimetype": "text/x-python",
        "name": "python",
        "nbconvert_exporter": "python",
        "pygments_lexer": "ipython3",
        "version": "3.11.7",
    },
}


def stripped(text: str) -> str:
    """The notebook's JSON without outputs, run counts and the state of widgets, kernel and language as Lab has them.

    Args:
        text: A notebook, nbformat 4.

    Returns:
        The same text where there was nothing to remove, so that formatting alone is no difference.
    """
    notebook = json.loads(text)
    before = json.dumps(notebook)
    notebook["metadata"].pop("widgets", None)
    notebook["metadata"].update(LAB_METADATA)
    for cell in notebook["cells"]:
        cell["metadata"].pop("execution", None)
        if cell["cell_type"] == "code":
            cell["outputs"] = []
            cell["execution_count"] = None
    if json.dumps(notebook) == before:
        return text
    return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"


def main(argv: list[str] | None = None) -> int:
    """Strip, or with ``--check`` name what would be stripped and return 1."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; fail where there is something to strip")
    parser.add_argument("files", nargs="*", type=Path)
    options = parser.parse_args(argv)
    files = options.files or sorted((ROOT / "notebooks").glob("[!.]*.ipynb"))
    dirty = []
    for path in files:
        text = path.read_text(encoding="utf-8")
        clean = stripped(text)
        if clean == text:
            continue
        dirty.append(path)
        if not options.check:
            path.write_text(clean, encoding="utf-8")
    for path in dirty:
        print(f"{path}: {'has outputs; run make fmt' if options.check else 'stripped'}")
    return 1 if options.check and dirty else 0


if __name__ == "__main__":
    sys.exit(main())
