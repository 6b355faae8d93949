"""`records.console`: tables and sentences as text, wherever the program runs."""

import builtins

import pytest

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
