"""A session goes on where another stopped, on other devices too; foreign and damaged files are refused."""

from __future__ import annotations

import io
import json
import zipfile

import numpy as np
import pytest

from hocket.cli import main
from hocket.frontends.errors import ModelError
from hocket.frontends.gguf import open_gguf
from hocket.frontends.inference.saved_state import load_state, save_state
from hocket.frontends.inference.session import DeviceGroup, Session
from hocket.frontends.models import load_model
from hocket.frontends.open_model import open_model

from ...given.models.architectures import write_model
from ...given.models.goldens import nmse, path_of

TOKENS = [5, 17, 33, 2, 60, 41, 8, 19, 77, 3]
DEVICE_GROUPS = {
    "one": DeviceGroup(exact=True),
    "two": DeviceGroup(devices=("cpu:0", "cpu:1"), split_mode="tensor", exact=True),
    "three": DeviceGroup(devices=("cpu:0", "cpu:1", "cpu:2"), split_mode="tensor", tensor_split=(3, 1, 1), exact=True),
    "layers": DeviceGroup(devices=("cpu:0", "cpu:1"), split_mode="layer", exact=True),
}


@pytest.fixture
def saved_state(tmp_path):
    """A state after six tokens of the embedded model, and the logits of the four that follow."""
    session = Session(open_model(None), on=DEVICE_GROUPS["one"])
    session.evaluate([TOKENS[:6]])
    path = tmp_path / "state.npz"
    save_state(session, [TOKENS[:6]], path)
    return path, session.evaluate([TOKENS[6:]], every_position=True)[0]


@pytest.mark.long
@pytest.mark.parametrize("group", DEVICE_GROUPS.values(), ids=DEVICE_GROUPS)
def test_a_session_goes_on_over_any_number_of_devices(saved_state, group):
    path, expected = saved_state
    session = Session(open_model(None), on=group, context=64)
    session.evaluate([[1, 2, 3]])  # its earlier tokens are forgotten
    assert load_state(session, path) == [TOKENS[:6]]
    assert session.lengths == [6]
    got = session.evaluate([TOKENS[6:]], every_position=True)[0]
    assert nmse(got, expected) < 1e-11


@pytest.mark.long
@pytest.mark.parametrize("group", DEVICE_GROUPS.values(), ids=DEVICE_GROUPS)
def test_what_several_devices_save_one_can_load(saved_state, group, tmp_path):
    _, expected = saved_state
    session = Session(open_model(None), on=group)
    session.evaluate([TOKENS[:6]])
    save_state(session, [TOKENS[:6]], tmp_path / "other.npz")
    fresh = Session(open_model(None), on=DEVICE_GROUPS["one"])
    load_state(fresh, tmp_path / "other.npz")
    got = fresh.evaluate([TOKENS[6:]], every_position=True)[0]
    assert nmse(got, expected) < 1e-11


@pytest.mark.long
@pytest.mark.nightly(cases=4)
@pytest.mark.parametrize("model", ["deepseek4-moe", "deepseek2-moe", "glm5-next-moe", "qwen4exp-moe"])
@pytest.mark.parametrize("context", [24, 64, 101])
def test_compressed_caches_go_on_in_a_context_of_another_size(model, context, tmp_path):
    compressed = open_model(write_model(model, tmp_path))
    first = Session(compressed, on=DEVICE_GROUPS["one"], context=40, sequences=2)
    tokens = [TOKENS[:3], [*TOKENS, *TOKENS[3:]]]
    first.evaluate(tokens)
    save_state(first, tokens, tmp_path / "state")
    expected = first.evaluate([TOKENS[:5], TOKENS[:6]], every_position=True)
    second = Session(compressed, on=DEVICE_GROUPS["two"], context=context, sequences=2)
    second.evaluate([[1, 2], TOKENS])
    assert load_state(second, tmp_path / "state") == tokens
    got = second.evaluate([TOKENS[:5], TOKENS[:6]], every_position=True)
    assert all(nmse(one, other) < 1e-9 for one, other in zip(got, expected, strict=True))


def test_a_state_of_another_model_is_refused(saved_state):
    session = Session(load_model(open_gguf(path_of("qwen35"))))
    with pytest.raises(ModelError, match="another model"):
        load_state(session, saved_state[0])


def test_a_state_that_does_not_fit_the_context_is_refused(saved_state):
    with pytest.raises(ModelError, match="has 6 tokens, but the context holds 4"):
        load_state(Session(open_model(None), context=4), saved_state[0])


def test_a_damaged_file_is_refused_and_changes_nothing(saved_state, tmp_path):
    path, _ = saved_state
    data = path.read_bytes()
    session = Session(open_model(None))
    session.evaluate([[1, 2, 3]])
    before = {name: np.array(session.store.state(name)) for name in session.store.states}
    rng = np.random.default_rng(0)
    damaged = tmp_path / "damaged.npz"
    texts = [data[: int(n)] for n in rng.integers(0, len(data) - 1, 30)] + [b"", b"not a zip at all"]
    for text in texts:
        damaged.write_bytes(text)
        with pytest.raises(ModelError) as caught:
            load_state(session, damaged)
        assert "\n" not in str(caught.value)
    assert session.lengths == [3]
    for name, array in before.items():
        np.testing.assert_array_equal(session.store.state(name), array)


def test_a_save_that_fails_leaves_the_old_file(saved_state, monkeypatch):
    path, _ = saved_state
    before = path.read_bytes()

    def full(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez", full)
    with pytest.raises(OSError, match="No space"):
        save_state(Session(open_model(None)), [[]], path)
    assert path.read_bytes() == before
    assert [p.name for p in path.parent.iterdir()] == [path.name]


@pytest.mark.long
def test_the_command_line_goes_on_where_it_stopped(tmp_path, capsys):
    from hocket.cli import main

    path = str(tmp_path / "state.npz")
    assert main(["run", "-p", "It is a truth", "-n", "12"]) == 0
    whole = capsys.readouterr().out.strip()
    assert main(["run", "-p", "It is a truth", "-n", "5", "--save-state", path]) == 0
    first = capsys.readouterr().out.strip()
    more = ["run", "-p", whole[len(first) :][:1], "-n", "3", "--load-state", path, "--devices", "cpu:0,cpu:1"]
    assert main(more) == 0
    assert main(["run", "-p", "x", "--load-state", str(tmp_path / "missing")]) == 2
    assert main(["run", "-p", "x", "--load-state", __file__]) == 2
    assert "not a saved state" in capsys.readouterr().err


@pytest.mark.long
@pytest.mark.parametrize("temperature", ["0", "0.8"])
def test_a_text_that_goes_on_later_is_the_text_in_one_go(tmp_path, capsys, temperature):
    """Also over other devices, and with text in between; the last token that was shown is not lost."""

    def text(*words: str) -> str:
        assert main(["run", "--temp", temperature, "--seed", "7", "--exact", *words]) == 0
        return capsys.readouterr().out.removesuffix("\n")

    saved_state, again = str(tmp_path / "one"), str(tmp_path / "two")
    whole = text("-p", "It is a truth", "-n", "12")
    parts = text("-p", "It is a truth", "-n", "5", "--save-state", saved_state)
    parts += text("-n", "4", "--load-state", saved_state, "--save-state", again, "--devices", "cpu:0,cpu:1")
    assert parts + text("-n", "3", "--load-state", again) == whole
    continuation = text("-p", parts + " she said", "-n", "3")
    assert parts + text("-p", " she said", "-n", "3", "--load-state", again) == continuation


def _npy(head: str, content: bytes = b"") -> bytes:
    return b"\x93NUMPY\x01\x00" + len(head).to_bytes(2, "little") + head.encode() + content


HEAD = "{{'descr': '{}', 'fortran_order': False, 'shape': ({},), }}\n"
DAMAGE = {
    "an array of 4 TB": {
        "state/x.npy": _npy("{'descr': '<f4', 'fortran_order': False, 'shape': (1000000000000,), }\n")
    },
    "a shape that is no Python": {"state/x.npy": _npy("{'descr': '<f4', 'shape': (((\n")},
    "an array of objects": {
        "state/x.npy": _npy("{'descr': '|O', 'fortran_order': False, 'shape': (1,), }\n", b"12345678")
    },
    "a header nested deep": {"header.npy": b"[" * 100_000},
    "tokens that are no list": {"header.npy": lambda header: header | {"tokens": ["1"]}},
    "tokens that are texts": {"header.npy": lambda header: header | {"tokens": [["1", "2", "3"]]}},
    "a length that is true": {"header.npy": lambda header: header | {"lengths": [True]}},
    "no header": {"header.npy": None},
    "something else": {"x.npy": b""},
}


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A session of a small model, and a state that it saved."""
    session = Session(open_model(path_of("qwen35")), on=DeviceGroup(devices=("numpy:0",)), context=16, batch=8)
    session.evaluate([[1, 2, 3]])
    path = tmp_path_factory.mktemp("small") / "state.npz"
    save_state(session, [[1, 2, 3]], path)
    return session, path


@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_what_the_fuzzer_found_is_one_line(small, tmp_path, damage, compression):
    """Each of these raised something else, or was read; a compressed archive is none of ours."""
    with zipfile.ZipFile(small[1]) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    for name, content in damage.items():
        text = content
        if callable(content):
            text = json.dumps(content(json.loads(np.load(io.BytesIO(members[name])).tobytes()))).encode()
        if name == "header.npy" and text is not None:
            file = io.BytesIO()
            np.save(file, np.frombuffer(text, np.uint8))
            text = file.getvalue()
        members[name] = text
    path = tmp_path / "damaged.npz"
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, content in members.items():
            if content is not None:
                archive.writestr(name, content)
    with pytest.raises(ModelError, match="not a saved state of this model") as raised:
        load_state(small[0], path)
    assert str(raised.value).isprintable()


def test_an_archive_that_points_before_its_file_is_one_line(small, tmp_path):
    data = small[1].read_bytes()
    end = data.rindex(b"PK\5\6")
    path = tmp_path / "damaged.npz"
    path.write_bytes(data[: end + 12] + b"\xff" * 8 + data[end + 20 :])
    with pytest.raises(ModelError, match="not a saved state of this model"):
        load_state(small[0], path)
