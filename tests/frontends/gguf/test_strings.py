"""Strings of a header, which are found all at once."""

from __future__ import annotations

import struct
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hocket.frontends.errors import ModelError
from hocket.frontends.gguf import mapped_file
from hocket.frontends.gguf.mapped_file import HeaderCursor, map_file


@given(
    st.lists(st.binary(max_size=20) | st.text(max_size=20).map(str.encode) | st.just(b"x" * 300), max_size=30),
    st.sampled_from([1, 7, mapped_file.STRINGS_PER_READ]),
)
@settings(max_examples=60, deadline=None)
def test_strings_found_at_once_are_those_read_one_by_one(
    tmp_path_factory: pytest.TempPathFactory, texts: list[bytes], many: int
) -> None:
    path = tmp_path_factory.mktemp("strings") / "strings"
    path.write_bytes(b"".join(struct.pack("<Q", len(text)) + text for text in texts) + b"rest")
    one_by_one, at_once, passed = (HeaderCursor(map_file(path)) for _ in range(3))
    with mock.patch.object(mapped_file, "STRINGS_PER_READ", many):
        found = at_once.read_strings(len(texts))
    assert found == [one_by_one.read_string() for _ in texts]
    passed.skip_strings_undecoded(len(texts))
    assert one_by_one.position == at_once.position == passed.position
    with pytest.raises(ModelError):
        HeaderCursor(map_file(path)).skip_strings_undecoded(len(texts) + 1)
