"""The time of operations, read from profiles that are made up."""

import os
import re
import shutil
import sys

import pytest
from tensorflow.tsl.profiler.protobuf import xplane_pb2

from tfamp.trials.measurements import seconds_by_type

MS = 10**9  # picoseconds


class Plane:
    """Makes a plane of a profile."""

    def __init__(self, space, name):
        self.plane = space.planes.add(name=name)

    def number(self, table, text):
        """Returns the number that a text is kept under."""
        for key, known in table.items():
            if known.name == text:
                return key
        key = len(table) + 1
        table[key].name, table[key].id = text, key
        return key

    def line(self, name, *events, start_ms=0):
        """Adds a line of (name, start in ms, duration in ms, stats)."""
        line = self.plane.lines.add(name=name, timestamp_ns=start_ms * 10**6)
        for label, start, duration, *stats in events:
            event = line.events.add(
                metadata_id=self.number(self.plane.event_metadata, label),
                offset_ps=int(start * MS),
                duration_ps=int(duration * MS),
            )
            for key, value in stats[0].items() if stats else ():
                stat = event.stats.add(
                    metadata_id=self.number(self.plane.stat_metadata, key)
                )
                # Texts that come often are kept beside the names of stats.
                stat.ref_value = self.number(self.plane.stat_metadata, value)


def written(folder, fill, name="host.xplane.pb"):
    """Writes a profile and returns its folder."""
    space = xplane_pb2.XSpace()
    fill(space)
    run = folder / "plugins" / "profile" / "2026_01_01"
    run.mkdir(parents=True, exist_ok=True)
    (run / name).write_bytes(space.SerializeToString())
    return folder


def host(space):
    plane = Plane(space, "/host:CPU")
    plane.line(
        "tf_Compute/1",
        ("ExecutorState::Process", 0, 100),
        ("Call/m/a/MatMul:_MklMatMul", 0, 10),
        ("Call/m/a/MatMul:_MklMatMul", 10, 20),
        ("m/while:While", 40, 30),  # 18 ms of it are those inside
        ("m/while/body/_3/m/b/Mul:Mul", 45, 8),
        ("m/while/body/_3/m/b/Mul:Mul", 55, 10),
        start_ms=1000,
    )
    plane.line("tf_Compute/2", ("m/b/Mul:Mul", 50, 2), start_ms=1020)
    plane.line("python", ("EagerLocalExecute: Cast", 0, 50), ("$file.py:3 f", 0, 9))
    Plane(space, "Task Environment")


def approx(**seconds):
    return {kind: pytest.approx(value, abs=1e-9) for kind, value in seconds.items()}


def test_operations_are_added_up_by_type_with_their_own_time(tmp_path):
    found = seconds_by_type(written(tmp_path, host))
    assert found == approx(_MklMatMul=0.030, Mul=0.020, While=0.012)
    assert list(found) == ["_MklMatMul", "Mul", "While"]


def test_kernels_of_a_gpu_are_named_by_their_operation(tmp_path):
    def fill(space):
        Plane(space, "/host:CPU").line("tf_Compute", ("m/a/MatMul:MatMul", 0, 1))
        gpu = Plane(space, "/device:GPU:0")
        operation = {"tf_op": "m/a/MatMul:MatMul"}
        gpu.line("Stream #13(Compute)", ("volta_gemm", 2, 30, operation))
        gpu.line("TensorFlow Ops", ("m/a/MatMul:MatMul", 2, 30))
        gpu.line("Steps", ("1", 0, 40))

    # What launches a kernel is not the operation's time.
    assert seconds_by_type(written(tmp_path, fill)) == approx(MatMul=0.030)


def test_instructions_of_xla_are_named_without_their_numbers(tmp_path):
    def fill(space):
        plane = Plane(space, "/host:CPU")
        plane.line(
            "tf_numa",
            ("dot.12", 0, 3, {"hlo_op": "dot.12", "hlo_module": "step"}),
            ("MatMul_1.30.clone", 3, 2, {"hlo_op": "MatMul_1.30.clone"}),
            ("pad_add_fusion", 5, 1, {"hlo_op": "pad_add_fusion"}),
            ("BlockUntilReady", 0, 9, {"id": "4"}),
        )

    found = seconds_by_type(written(tmp_path, fill))
    assert found == approx(dot=0.003, MatMul=0.002, pad_add_fusion=0.001)


def test_operations_inside_operations_inside_are_taken_off_once(tmp_path):
    def fill(space):
        Plane(space, "/host:CPU").line(
            "tf_Compute",
            # In no order; the outer two begin together.
            ("c:C", 2, 3),
            ("b:B", 0, 6),
            ("a:A", 0, 10),
            ("d:D", 10, 1),
        )

    found = seconds_by_type(written(tmp_path, fill))
    assert found == approx(A=0.004, B=0.003, C=0.003, D=0.001)


def test_of_several_profiles_the_newest_counts_with_all_its_hosts(tmp_path):
    def one(kind):
        return lambda space: Plane(space, "/host:CPU").line("l", (f"x:{kind}", 0, 1))

    written(tmp_path, one("A"), "a.xplane.pb")
    written(tmp_path, one("B"), "b.xplane.pb")
    old = tmp_path / "plugins" / "profile" / "2025" / "a.xplane.pb"
    old.parent.mkdir()
    shutil.copy(tmp_path / "plugins/profile/2026_01_01/a.xplane.pb", old)
    os.utime(old, (0, 0))
    assert seconds_by_type(tmp_path) == approx(A=0.001, B=0.001)


def test_no_profile_a_damaged_one_and_an_empty_one_are_told(tmp_path):
    text = f"The profile in {str(tmp_path)!r} holds no operations; expected those of"
    with pytest.raises(ValueError, match=re.escape(text)):
        seconds_by_type(tmp_path)
    written(tmp_path, lambda space: None)
    with pytest.raises(ValueError, match=re.escape(text)):
        seconds_by_type(tmp_path)
    path = next(tmp_path.rglob("*.pb"))
    path.write_bytes(b"\xff\xff\xff\xff")
    text = f"The profile {str(path)!r} is damaged ("
    with pytest.raises(ValueError, match=re.escape(text)):
        seconds_by_type(tmp_path)


def test_a_tensorflow_that_cannot_read_profiles_is_told(tmp_path, monkeypatch):
    written(tmp_path, host)
    name = "tensorflow.tsl.profiler.protobuf.xplane_pb2"
    monkeypatch.setitem(sys.modules, name, None)
    text = f"TensorFlow here has no {name!r}; expected TensorFlow 2.19 to 2.21."
    with pytest.raises(ImportError, match=re.escape(text)):
        seconds_by_type(tmp_path)
