"""Print how the plans compare: ``python -m mla_workspace``."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from mla_workspace.compare import BATCHES, HEADERS, cells


def main() -> None:
    """Print the table."""
    table = Table(title="Chunks of MLA context: equal / proportional")
    for column, header in enumerate(HEADERS):
        table.add_column(header, justify="left" if column < 2 else "right")
    for batch in BATCHES:
        table.add_row(*cells(batch))
    Console().print(table)


if __name__ == "__main__":
    main()
