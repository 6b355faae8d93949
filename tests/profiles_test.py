"""Profiles: capturing one, reading the time of operations."""

import re
import shutil
import sys
import types

import pytest
import tensorflow as tf
from tensorflow.tsl.profiler.protobuf import xplane_pb2

from tfamp import profiles
from tfamp.profiles import OperationTimes
from tfamp.profiles.scopes import scope_of
from tfamp.profiles.xplane import Timed, read_operations

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


def test_operations_are_added_up_by_type_with_their_own_time(tmp_path):
    times = profiles.operation_times(written(tmp_path, host), steps=2)
    # 30 + 12 + 20 = 62 ms.
    assert [
        (t.type, t.where, t.count, t.total_seconds, t.self_seconds, t.share)
        for t in times.by_type
    ] == [
        ("_MklMatMul", "host", 2, *approx(0.030, 0.030, 30 / 62)),
        ("Mul", "host", 3, *approx(0.020, 0.020, 20 / 62)),
        ("While", "host", 1, *approx(0.030, 0.012, 12 / 62)),
    ]
    # From 1000 ms to 1020 + 52 ms.
    assert times.wall_seconds == pytest.approx(0.072)
    assert times.steps == 2


def approx(*values):
    return [pytest.approx(value, abs=1e-9) for value in values]


def test_operations_are_added_up_by_name_and_layer(tmp_path):
    times = profiles.operation_times(written(tmp_path, host))
    assert [(t.name, t.layer, t.count) for t in times.by_name] == [
        ("Call/m/a/MatMul", "Call/m/a", 2),
        ("m/while/body/_3/m/b/Mul", "m/b", 2),
        ("m/while", "m", 1),
        ("m/b/Mul", "m/b", 1),
    ]
    assert times.by_layer == {
        "Call/m/a": approx(0.03)[0],
        "m/b": approx(0.02)[0],
        "m": approx(0.012)[0],
    }
    assert list(times.by_layer) == ["Call/m/a", "m/b", "m"]


def test_kernels_of_a_gpu_are_named_by_their_operation(tmp_path):
    def fill(space):
        Plane(space, "/host:CPU").line("tf_Compute", ("m/a/MatMul:MatMul", 0, 1))
        gpu = Plane(space, "/device:GPU:0")
        operation = {"tf_op": "m/a/MatMul:MatMul"}
        gpu.line("Stream #13(Compute)", ("volta_gemm", 2, 30, operation))
        gpu.line("TensorFlow Ops", ("m/a/MatMul:MatMul", 2, 30))
        gpu.line("Steps", ("1", 0, 40))

    times = profiles.operation_times(written(tmp_path, fill))
    assert [(t.type, t.where, t.self_seconds, t.share) for t in times.by_type] == [
        ("MatMul", "device", *approx(0.030), 1.0),
        ("MatMul", "host", *approx(0.001), 1.0),
    ]
    # What launches a kernel is not the layer's time.
    assert times.by_layer == {"m/a": approx(0.030)[0]}


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

    found = read_operations(written(tmp_path, fill))
    assert [(run.name, run.kind) for run in found] == [
        ("dot.12", "dot"),
        ("MatMul_1.30.clone", "MatMul"),
        ("pad_add_fusion", "pad_add_fusion"),
    ]


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

    found = {
        run.kind: run.self_seconds for run in read_operations(written(tmp_path, fill))
    }
    assert found == {
        "A": approx(0.004)[0],
        "B": approx(0.003)[0],
        "C": approx(0.003)[0],
        "D": approx(0.001)[0],
    }


def test_of_several_profiles_the_newest_counts_with_all_its_hosts(tmp_path):
    import os

    def one(kind):
        return lambda space: Plane(space, "/host:CPU").line("l", (f"x:{kind}", 0, 1))

    written(tmp_path, one("A"), "a.xplane.pb")
    written(tmp_path, one("B"), "b.xplane.pb")
    old = tmp_path / "plugins" / "profile" / "2025" / "a.xplane.pb"
    old.parent.mkdir()
    shutil.copy(tmp_path / "plugins/profile/2026_01_01/a.xplane.pb", old)
    os.utime(old, (0, 0))
    assert [run.kind for run in read_operations(tmp_path)] == ["A", "B"]


def test_times_go_to_json_and_back(tmp_path):
    times = profiles.operation_times(written(tmp_path, host), steps=2)
    assert OperationTimes.from_json(times.to_json()) == times


SCOPES = {
    "forward": ("m/dense/MatMul", ("m", "dense")),
    "in a call": ("StatefulPartitionedCall_1/m/dense/MatMul", ("m", "dense")),
    "in a loop": (
        "m/while/body/_24/m/while/cell/add",
        ("m", "while", "cell"),
    ),
    "backward in a loop": (
        "gradient_tape/m/while/grad/body/_107/gradient_tape/m/while/cell/MatMul",
        ("m", "while", "cell"),
    ),
    "alone": ("AssignAddVariableOp_3", ()),
}


@pytest.mark.parametrize("name, expected", SCOPES.values(), ids=SCOPES)
def test_scopes_are_what_stands_around_an_operation(name, expected):
    assert scope_of(name) == expected


def test_a_real_profile_shows_what_takes_the_time(tmp_path):
    large, small = tf.random.normal((768, 768)), tf.random.normal((4, 4))

    @tf.function
    def step(large, small):
        with tf.name_scope("heavy"):
            heavy = tf.linalg.matmul(large, large)
        with tf.name_scope("light"):
            light = tf.nn.relu(tf.linalg.matmul(small, small))
        return tf.reduce_sum(heavy), light

    step(large, small)
    with profiles.capture(tmp_path) as folder:
        for _ in range(3):
            step(large, small)
    assert folder == tmp_path
    times = profiles.operation_times(folder, steps=3)
    first = times.by_type[0]
    # 2 * 768**3 FLOPs against 768**2 of the sum, and 2 * 4**3.
    assert first.type.endswith("MatMul")
    assert (first.count, first.share > 0.8) == (6, True)
    assert times.by_layer["heavy"] > 10 * times.by_layer["light"] > 0
    # All in one thread or more, but no longer than the profile for one operation.
    heavy = times.by_name[0]
    assert (heavy.layer, heavy.count) == ("heavy", 3)
    assert 0 < heavy.self_seconds <= times.wall_seconds


def test_a_block_that_fails_leaves_no_profile_and_no_profiler(tmp_path):
    class Bad(Exception):
        pass

    def fail():
        with profiles.capture(tmp_path):
            raise Bad

    with pytest.raises(Bad):
        fail()
    assert list(tmp_path.rglob("*.pb")) == []
    with profiles.capture(tmp_path):
        tf.linalg.matmul(tf.ones((2, 2)), tf.ones((2, 2)))
    assert len(list(tmp_path.rglob("*.pb"))) == 1


def enter(directory):
    with profiles.capture(directory):
        tf.ones(())


def test_a_second_profiler_is_refused_and_the_first_goes_on(tmp_path):
    text = "TensorFlow's profiler is running already; expected it to be free."
    with profiles.capture(tmp_path / "a"):
        with pytest.raises(RuntimeError, match=re.escape(text)):
            enter(tmp_path / "b")
    assert len(list((tmp_path / "a").rglob("*.pb"))) == 1


def test_a_profiler_that_was_stopped_inside_is_told(tmp_path):
    def run():
        with profiles.capture(tmp_path):
            tf.profiler.experimental.stop()

    text = "TensorFlow's profiler was stopped inside the block; expected it to run"
    with pytest.raises(RuntimeError, match=re.escape(text)):
        run()


def test_a_block_that_stops_the_profiler_and_fails_raises_its_own_error(tmp_path):
    def run():
        with profiles.capture(tmp_path):
            tf.profiler.experimental.stop()
            raise KeyError("its own")

    with pytest.raises(KeyError, match="its own"):
        run()


def test_a_full_disk_is_told_before_and_after(tmp_path, monkeypatch):
    usage = types.SimpleNamespace(free=3 * 2**20)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: usage)
        text = (
            f"`directory` is {str(tmp_path)!r}, where 3.0 MiB are free; expected "
            "64.0 MiB for a profile. Free some room, or pass another one."
        )
        with pytest.raises(OSError, match=re.escape(text)):
            enter(tmp_path)
    stop = tf.profiler.experimental.stop

    def full(save=True):
        stop(save=False)
        raise tf.errors.ResourceExhaustedError(None, None, "No space left on device")

    monkeypatch.setattr(tf.profiler.experimental, "stop", full)
    text = (
        f"The profile could not be written to {str(tmp_path)!r} (No space left on "
        "device); expected a folder with room."
    )
    with pytest.raises(OSError, match=re.escape(text)):
        enter(tmp_path)


def test_a_directory_that_is_none_is_told(tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    text = f"`directory` is {str(file)!r}, which cannot be made (File exists); expected"
    with pytest.raises(OSError, match=re.escape(text)):
        enter(file)
    text = "`directory` is 3, of type int; expected a path. Pass a string."
    with pytest.raises(TypeError, match=re.escape(text)):
        enter(3)


def test_no_profile_a_damaged_one_and_an_empty_one_are_told(tmp_path):
    text = f"`directory` is {str(tmp_path)!r}, which holds no profile; expected"
    with pytest.raises(FileNotFoundError, match=re.escape(text)):
        profiles.operation_times(tmp_path)
    written(tmp_path, lambda space: None)
    text = f"The profile in {str(tmp_path)!r} holds no operations; expected some steps."
    with pytest.raises(ValueError, match=re.escape(text)):
        profiles.operation_times(tmp_path)
    path = next(tmp_path.rglob("*.pb"))
    path.write_bytes(b"\xff\xff\xff\xff")
    text = f"The profile {str(path)!r} is damaged ("
    with pytest.raises(ValueError, match=re.escape(text)):
        profiles.operation_times(tmp_path)


def test_a_tensorflow_that_cannot_read_profiles_is_told(tmp_path, monkeypatch):
    written(tmp_path, host)
    name = "tensorflow.tsl.profiler.protobuf.xplane_pb2"
    monkeypatch.setitem(sys.modules, name, None)
    text = f"TensorFlow here has no {name!r}; expected TensorFlow 2.19 to 2.21."
    with pytest.raises(ImportError, match=re.escape(text)):
        profiles.operation_times(tmp_path)


def test_steps_have_to_be_a_number_of_at_least_1(tmp_path):
    with pytest.raises(ValueError, match="`steps` is 0; expected an integer"):
        profiles.operation_times(tmp_path, steps=0)


def test_a_run_of_an_operation_names_its_values(tmp_path):
    first = read_operations(written(tmp_path, host))[0]
    assert first == Timed(
        "Call/m/a/MatMul", "_MklMatMul", "host", *approx(1.0, 0.010, 0.010)
    )
