"""`records.console`: tables and sentences as text, and when a bar is shown."""

import builtins
import io

import pytest
import rich.console

from tfamp.records import console


def text():
    rows = [["dense", "float16"], ["x[0]", "float32"]]
    columns = {"layer": console.FOLD, "dtype": console.WHOLE}
    return console.text_of("Dtypes", console.table(columns, rows))


def test_text_holds_sentences_and_cells_as_they_were_given():
    lines = text().splitlines()
    assert lines[0] == "Dtypes"
    assert any("x[0]" in line and "float32" in line for line in lines)


# As rich asks for it: the classes of Jupyter's kernels and of Colab's.
KERNELS = {"Jupyter": "ipykernel.zmqshell", "Colab": "google.colab._shell"}


@pytest.mark.parametrize("module", KERNELS.values(), ids=list(KERNELS))
def test_a_notebook_gets_the_same_text(monkeypatch, module):
    expected = text()
    shell = type("ZMQInteractiveShell", (), {"__module__": module})
    monkeypatch.setattr(builtins, "get_ipython", shell, raising=False)
    assert text() == expected


def drawn(seconds, *updates, **options):
    """Returns what a terminal gets of a bar that is updated at some time."""
    terminal = rich.console.Console(
        file=io.StringIO(), force_terminal=True, width=110, color_system=None
    )
    now = [0.0]
    how = {"console": terminal, "clock": lambda: now[0], **options}
    with console.progress("Starting", 4, **how) as update:
        now[0] = seconds
        for done in updates:
            update(*done)
    return terminal.file.getvalue()


def test_short_work_shows_nothing():
    assert drawn(1.9, (1,)) == ""


@pytest.mark.parametrize(
    "updates, options, expected",
    [
        ([(3,)], {"unit": "rows"}, ["Starting", "3 rows", "left"]),
        (
            [(1,), (2.5, "auto, seed 0")],
            {"unit": "of 4 runs", "decimals": 1},
            ["auto, seed 0", "2.5 of 4 runs"],
        ),
    ],
    ids=["rows", "parts of runs"],
)
def test_longer_work_shows_what_is_done_of_how_much(updates, options, expected):
    found = drawn(2.1, *updates, **options)
    assert all(text in found for text in expected)


def test_no_bar_goes_into_a_file_whatever_colours_are_asked_for(monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    now = [0.0]
    with console.progress("Starting", 4, clock=lambda: now[0]) as update:
        now[0] = 9.0
        update(3)
    assert capsys.readouterr().err == ""
