"""`records.console`: tables and sentences as text, and when a bar is shown."""

import io
import sys

from tfamp.records import console


def text():
    rows = [["dense", "float16"], ["x[0]", "float32"]]
    columns = {"layer": console.FOLD, "dtype": console.WHOLE}
    return console.text_of("Dtypes", console.table(columns, rows))


def test_text_holds_sentences_and_cells_as_they_were_given():
    lines = text().splitlines()
    assert lines[0] == "Dtypes"
    assert any("x[0]" in line and "float32" in line for line in lines)


def test_a_title_is_not_broken_where_a_narrow_table_ends():
    title = "a title that is longer than its table"
    table = console.table({"a": {}}, [["1"]], title=title)
    shown = console.text_of(table)
    assert shown.startswith(f"{title}\n┏━━━┓") and shown == console.text_of(table)


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_work_shows_what_is_done_of_how_much(monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    with console.progress("Starting", 4, unit="of 4 runs", decimals=1) as update:
        update(2.5, "auto, seed 0")
    found = sys.stderr.getvalue()
    assert all(text in found for text in ("auto, seed 0", "2.5 of 4 runs"))


def test_no_bar_goes_into_a_file_whatever_colors_are_asked_for(monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    with console.progress("Starting", 4) as update:
        update(3)
    assert capsys.readouterr().err == ""
