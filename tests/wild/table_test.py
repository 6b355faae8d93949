"""The table of the corpus in the docs is whole."""

from tests.wild import programs_of_applications, table
from tests.wild.programs.registry import PROGRAMS


def test_every_program_has_a_row_without_an_empty_cell():
    rows = table.rows_of(table.OUT.read_text(encoding="utf-8"))
    assert set(PROGRAMS) | set(programs_of_applications.FAMILIES) <= set(rows)
    for row in rows.values():
        assert len(row) == len(table.COLUMNS)
        assert all(cell.strip() for cell in row)


def test_what_is_written_is_read_again():
    rows = {name: (name, *"bcdefghi", "0.1 (9% off)") for name in ("vae", "dcgan")}
    assert table.rows_of(table.heading() + table.rendered(rows)) == rows
