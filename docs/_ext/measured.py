"""The directive ``measured``: a table of what ``benchmarks/results/NAME.csv`` holds, made when the pages are built.

::

    ```{measured} numpy_speed
    :only: quantity=time; variant=clipaware|naive
    :rows: rows, n
    :columns: variant
    ```

Below it stand the device, the versions and the date that the file names.
"""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any, ClassVar

from docutils import nodes
from docutils.parsers.rst import directives
from sphinx.util.docutils import SphinxDirective

VERSIONS = {"clipaware": "clipaware", "NumPy": "numpy", "Python": "python"}
SIZES = {"rows", "n"}
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


class Measured(SphinxDirective):
    """One table."""

    required_arguments = 1
    option_spec: ClassVar[dict[str, Any]] = {
        "only": directives.unchanged_required,  # column=value|value; column=value: these lines of the file
        "rows": directives.unchanged_required,  # columns of the file that tell a row of the table
        "columns": directives.unchanged_required,  # the column of the file that tells a column of the table
        "names": directives.unchanged_required,  # value=heading; value=heading
        "format": directives.unchanged_required,  # of a value; three digits unless told
        "unit": directives.unchanged_required,  # instead of the file's
    }

    def run(self) -> list[nodes.Node]:
        path = RESULTS / f"{self.arguments[0]}.csv"
        self.env.note_dependency(str(path))
        try:
            with path.open(newline="") as file:
                found = selected(list(csv.DictReader(file)), self.options.get("only", ""))
            lines = table(found, self.options)
        except (OSError, KeyError, ValueError) as error:
            raise self.error(f"measured: {path.name}: {error}") from error
        first = found[0]
        unit = self.options.get("unit", first["unit"])
        versions = ", ".join(f"{name} {first[key]}" for name, key in VERSIONS.items())
        source = (
            f"{f'In {unit}. ' if unit else ''}{first['device']}; {versions}; {first['date']}. "
            f"Again: `python -m benchmarks --case {first['case']}`."
        )
        content = self.parse_text_to_nodes("\n".join([*lines, "", source]), allow_section_headings=False)
        return [nodes.container("", *content, classes=["measured", "table-scroll"])]


def selected(lines: list[dict[str, str]], only: str) -> list[dict[str, str]]:
    """Those lines whose columns have one of the values wanted. Each value has to occur: a typing error is one."""
    for condition in filter(None, map(str.strip, only.split(";"))):
        column, _, wanted = condition.partition("=")
        values = wanted.split("|")
        missing = set(values) - {line[column] for line in lines}
        if missing:
            raise ValueError(f"nothing has {column} = {', '.join(sorted(missing))}")
        lines = sorted((line for line in lines if line[column] in values), key=lambda line: values.index(line[column]))
    return lines


def table(lines: list[dict[str, str]], options: dict[str, Any]) -> list[str]:
    """In Markdown."""
    index = [name.strip() for name in options["rows"].split(",")]
    across = options["columns"]
    names = dict(pair.strip().split("=", 1) for pair in options.get("names", "").split(";") if pair.strip())
    headings_of = {"n": "elements", "variant": ""} | names
    between = " x " if set(index) <= SIZES else ", "
    cells: dict[str, dict[str, str]] = {}
    for line in lines:
        row = between.join(f"{int(line[name]):,}" if name in SIZES else line[name] for name in index)
        if line[across] in cells.setdefault(row, {}):
            raise ValueError(f"two values for {row}, {line[across]}")
        cells[row][line[across]] = written(float(line["value"]), options.get("format"))
    headings = list(dict.fromkeys(line[across] for line in lines))
    first = between.join(headings_of.get(name, name) for name in index)
    return [
        f"| {first} | {' | '.join(names.get(heading, heading) for heading in headings)} |",
        "|---|" + "--:|" * len(headings),
        *(
            f"| {names.get(row, row)} | {' | '.join(found.get(heading, '') for heading in headings)} |"
            for row, found in cells.items()
        ),
    ]


def written(value: float, form: str | None) -> str:
    """In the format asked for, or with three digits and no power of ten for what has more before its point."""
    return format(value, form or (",.0f" if abs(value) >= 1000 else ".3g"))


def setup(app: Any) -> dict[str, bool]:
    app.add_directive("measured", Measured)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
