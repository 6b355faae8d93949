"""Photos of every size sent to `tfamp serve`, whole, in parts, slowly and by many."""

import concurrent.futures
import json
import socket

import numpy as np
import pytest

from tests.wild import served

pytest.importorskip("uvicorn", reason="needs tfamp[serve]")
pytest.importorskip("tf2onnx", reason="needs tfamp[onnx]")

PATH = "/v2/models/photos/infer"
# Means of numbers below 1 that were rounded to four places, summed in float32.
TOLERANCE = 1e-4
# Bytes of a photo in float32: 12 for each of its pixels.
SIZES = {"1 KB": 9, "62 KB": 72, "77 KB": 80, "600 KB": 224, "5 MB": 640, "20 MB": 1290}
# Each number takes nine bytes or so.
JSON_SIZES = {"1 KB": 6, "50 KB": 43, "80 KB": 55, "400 KB": 122, "3 MB": 334}
FORMS = {
    **{f"{size} of bytes": (served.in_bytes, n) for size, n in SIZES.items()},
    **{f"{size} of JSON": (served.in_json, n) for size, n in JSON_SIZES.items()},
}
every_form = pytest.mark.parametrize("form, side", FORMS.values(), ids=FORMS)


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    folder = served.export(tmp_path_factory.mktemp("served") / "photos")
    with served.serving(folder, deadline=600) as (_, found):
        yield found


def photo(side, seed=0):
    rng = np.random.default_rng(seed)
    return rng.random((1, side, side, 3), np.float32)


def is_right(answer, x):
    means = x.mean((1, 2), dtype=np.float64)
    return np.allclose(served.numbers(answer), means, atol=TOLERANCE)


def right_of(address, form, side, count):
    """Returns how many requests on one connection get the right answer."""
    found = 0
    with served.connect(address) as connection:
        for seed in range(count):
            x = photo(side, seed % 3)
            headers, body = form(x)
            status, answer = served.answered(connection, PATH, body, headers)
            found += status == 200 and is_right(answer, x)
    return found


@pytest.mark.slow("test_a_body_in_chunks_is_read_to_its_end")
@every_form
def test_200_of_200_requests_get_the_right_answer(address, form, side):
    assert right_of(address, form, side, count=200) == 200


@pytest.mark.quick("1 KB of bytes")
@every_form
def test_a_body_in_chunks_is_read_to_its_end(address, form, side):
    x = photo(side)
    headers, body = form(x)
    parts = [body[at : at + 50_000] for at in range(0, len(body), 50_000)]
    with served.connect(address) as connection:
        connection.request("POST", PATH, iter(parts), headers, encode_chunked=True)
        answer = connection.getresponse()
        assert answer.status == 200 and is_right(json.load(answer), x)


def head(body, headers):
    lines = [f"POST {PATH} HTTP/1.1", "Host: here", f"Content-Length: {len(body)}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode()


def statuses(stream, count):
    """Reads answers from a connection and returns their statuses."""
    found = []
    for _ in range(count):
        found.append(int(stream.readline().split()[1]))
        length = 0
        while (line := stream.readline()) != b"\r\n":
            name, _, value = line.partition(b":")
            if name.lower() == b"content-length":
                length = int(value)
        stream.read(length)
    return found


def open_connection(address):
    host, port = address.split(":")
    return socket.create_connection((host, int(port)), timeout=served.DEADLINE)


@pytest.mark.quick("1 KB of bytes")
@every_form
def test_a_slow_body_is_waited_for_while_others_are_answered(address, form, side):
    x = photo(side)
    headers, body = form(x)
    half = len(body) // 2
    with open_connection(address) as slow, served.connect(address) as other:
        slow.sendall(head(body, headers) + body[:half])
        assert served.answered(other, "/v2/health/ready")[0] == 200
        slow.sendall(body[half:])
        with slow.makefile("rb") as stream:
            assert statuses(stream, 1) == [200]


@pytest.mark.quick("bytes")
@pytest.mark.parametrize(
    "form", [served.in_bytes, served.in_json], ids=["bytes", "JSON"]
)
def test_64_connections_at_once_get_each_its_own_answer(address, form):
    def ask(seed):
        x = photo(130, seed)
        headers, body = form(x)
        found = []
        with served.connect(address) as connection:
            for _ in range(3):
                status, answer = served.answered(connection, PATH, body, headers)
                found.append(status == 200 and is_right(answer, x))
        return found

    with concurrent.futures.ThreadPoolExecutor(64) as pool:
        assert all(map(all, pool.map(ask, range(64))))
