"""`docs/protocol.md` and the messages agree, and the codec keeps what the page promises."""

from __future__ import annotations

import dataclasses
import re
import types
import typing
from pathlib import Path
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rpruntime.store.handle import Extent, Payload, TensorHandle
from rpruntime.wire import codec, messages, succession
from rpruntime.wire.codec import MAX_MESSAGE_BYTES, ProtocolError, decode, encode, pack_struct, unpack_struct
from tests.examples import examples

PAGE = (Path(__file__).resolve().parent.parent / "docs" / "protocol.md").read_text()
MESSAGES = codec.message_types()
STRUCTS = {
    name: cls
    for module in (
        messages.__dict__,
        succession.__dict__,
        {"Extent": Extent, "TensorHandle": TensorHandle, "Payload": Payload},
    )
    for name, cls in module.items()
    if isinstance(cls, type) and dataclasses.is_dataclass(cls) and name not in MESSAGES
}
ALL = {**MESSAGES, **STRUCTS}


def sections(mark: str) -> dict[str, str]:
    """Text below each heading that is a class name, up to the next heading."""
    parts = re.split(rf"^{mark} `(\w+)`$", PAGE, flags=re.M)
    names, texts = parts[1::2], parts[2::2]
    assert len(set(names)) == len(names), "a class has two sections"
    return {name: re.split(r"^##", text, flags=re.M)[0] for name, text in zip(names, texts, strict=True)}


DOCUMENTED = {**sections("##"), **sections("###")}


# --- the page


def test_one_section_a_class() -> None:
    assert set(sections("##")) == set(MESSAGES)
    assert set(sections("###")) == set(STRUCTS)


@pytest.mark.parametrize("name", sorted(ALL))
def test_fields_and_types_are_named(name: str) -> None:
    rows = re.findall(r"^\| `(\w+)` \| `([^`]*)` \| (.*) \|$", DOCUMENTED[name], flags=re.M)
    fields = dataclasses.fields(ALL[name])
    assert [(field, kind.replace("\\|", "|")) for field, kind, _ in rows] == [(f.name, f.type) for f in fields]
    for (_, _, meaning), field in zip(rows, fields, strict=True):
        default = field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING
        assert ("May be missing" in meaning) == default, field.name


def test_version_and_limits() -> None:
    assert re.findall(r"^Protocol version: \*\*(\d+)\*\*$", PAGE, flags=re.M) == [str(messages.PROTOCOL_VERSION)]
    assert f"{MAX_MESSAGE_BYTES:,}".replace(",", " ") + " bytes" in PAGE
    assert f"nest up to {codec.MAX_STRUCT_DEPTH} deep" in " ".join(PAGE.split())


# --- examples of every class, made from the types of its fields


TEXT = st.text(max_size=8)
PLAIN = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**31), 2**31),
    st.floats(allow_nan=False),
    TEXT,
    st.binary(max_size=8),
)
ANY = st.one_of(PLAIN, st.lists(PLAIN, max_size=3).map(tuple), st.dictionaries(TEXT, PLAIN, max_size=2))
BASIC: dict[Any, st.SearchStrategy[Any]] = {
    int: st.integers(-(2**63), 2**64 - 1),
    float: st.floats(allow_nan=False),
    bool: st.booleans(),
    str: TEXT,
    bytes: st.binary(max_size=8),
    Any: ANY,
    type(None): st.none(),
}


def of(hint: Any) -> st.SearchStrategy[Any]:
    """Values of a field's type."""
    if hint in BASIC:
        return BASIC[hint]
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is tuple and arguments[-1] is Ellipsis:
        return st.lists(of(arguments[0]), max_size=2).map(tuple)
    if origin is tuple:
        return st.tuples(*map(of, arguments))
    if origin is dict:
        return st.dictionaries(of(arguments[0]), of(arguments[1]), max_size=2)
    if origin in (types.UnionType, typing.Union):
        return st.one_of(*map(of, arguments))
    assert dataclasses.is_dataclass(hint), hint
    return instances(hint)


def instances(cls: Any) -> st.SearchStrategy[Any]:
    """Instances of a message or struct class."""
    hints = typing.get_type_hints(cls)
    return st.builds(cls, **{field.name: of(hints[field.name]) for field in dataclasses.fields(cls)})


@pytest.mark.parametrize("name", sorted(MESSAGES))
def test_every_message_travels(name: str) -> None:
    @settings(max_examples=8)
    @given(instances(MESSAGES[name]))
    def travels(msg: Any) -> None:
        frames = encode(msg)
        assert frames[0] == name.encode()
        received = decode(frames)
        assert received == msg
        assert type(received) is MESSAGES[name]

    travels()


@settings(max_examples=20)
@given(instances(messages.ModelSpec))
def test_the_deepest_struct_travels(spec: Any) -> None:
    assert unpack_struct(pack_struct(spec)) == spec


# --- what is tolerated, and what is refused


def body(**fields: Any) -> bytes:
    packed: bytes = msgpack.packb(fields)
    return packed


HELLO = {"role": "worker-0", "incarnation": 1, "pid": 2}
EXTENT = {"owner": "worker-0.1", "segment": "s", "offset": 0, "nbytes": 1}


def struct_bytes(name: Any, fields: Any) -> msgpack.ExtType:
    return msgpack.ExtType(1, msgpack.packb([name, fields]))


def nested(levels: int) -> bytes:
    packed: bytes = msgpack.packb(None)
    for _ in range(levels):
        packed = msgpack.packb(msgpack.ExtType(1, packed))
    return packed


def test_unknown_fields_are_ignored() -> None:
    assert decode([b"HelloMsg", body(**HELLO, colour="red")]) == messages.HelloMsg("worker-0", 1, 2)
    frames = [b"FreeMsg", msgpack.packb({"extents": [struct_bytes("Extent", {**EXTENT, "colour": [1]})]})]
    assert decode(frames) == messages.FreeMsg((Extent("worker-0.1", "s", 0, 1),))


def test_fields_with_a_default_may_be_missing() -> None:
    assert decode([b"HelloMsg", body(**HELLO)]).protocol == messages.PROTOCOL_VERSION
    assert decode([b"ShutdownMsg", body()]) == messages.ShutdownMsg("")


REFUSED = {
    "unknown type": ([b"NoSuchMsg", body()], "unknown type 'NoSuchMsg'"),
    "a struct is no message": ([b"Extent", body(**EXTENT)], "unknown type 'Extent'"),
    "type is no text": ([b"\xff\xfe", body()], "broken message"),
    "missing field": ([b"HelloMsg", body(role="worker-0")], "HelloMsg.*incarnation"),
    "list": ([b"HelloMsg", msgpack.packb([1, 2])], "not a map"),
    "number": ([b"HelloMsg", b"\x05"], "not a map"),
    "empty": ([b"HelloMsg", b""], "broken message"),
    "truncated": ([b"HelloMsg", body(**HELLO)[:-1]], "broken message"),
    "trailing bytes": ([b"HelloMsg", body(**HELLO) + b"\x00"], "broken message"),
    "reserved byte": ([b"HelloMsg", b"\xc1"], "broken message"),
    "oversized": ([b"ShutdownMsg", body(reason="x" * MAX_MESSAGE_BYTES)], "exceeds the limit"),
    "one frame": ([b"HelloMsg"], "1 frames instead of 2"),
    "no frame": ([], "0 frames instead of 2"),
    "three frames": ([b"HelloMsg", body(**HELLO), b""], "3 frames instead of 2"),
    "other extension": ([b"TaskMsg", body(task=msgpack.ExtType(7, b""))], "unknown extension 7"),
    "unknown struct": ([b"TaskMsg", body(task=struct_bytes("NoSuch", {}))], "unknown type 'NoSuch'"),
    "message as struct": (
        [b"TaskMsg", body(task=struct_bytes("HelloMsg", HELLO))],
        "unknown type 'HelloMsg'",
    ),
    "struct without fields": ([b"TaskMsg", body(task=struct_bytes("Extent", {}))], "Extent.*owner"),
    "struct is no pair": ([b"TaskMsg", body(task=msgpack.ExtType(1, b"\x05"))], "broken message"),
    "struct's name is a map": ([b"TaskMsg", body(task=struct_bytes({}, {}))], "broken message"),
    "struct's body is no map": ([b"TaskMsg", body(task=struct_bytes("Extent", 5))], "not a map"),
    # Without a limit this overflows the C stack and ends the process.
    "structs within structs": ([b"TaskMsg", nested(2000)], "more than 16 structures"),
    "lists within lists": ([b"TaskMsg", b"\x91" * 100_000 + b"\xc0"], "broken message"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str) -> None:
    frames, sentence = REFUSED[case]
    with pytest.raises(ProtocolError, match=sentence):
        decode(frames)


def test_every_truncation_is_refused() -> None:
    task = messages.SlotTask(1, 2, 3, "fused", (0, 2), (0, 1), 4, ((1, ("worker-0",)),), ("worker-1",))
    name, whole = encode(messages.TaskMsg(task))
    for length in range(len(whole)):
        with pytest.raises(ProtocolError):
            decode([name, whole[:length]])


def test_the_sender_refuses_what_is_too_large() -> None:
    with pytest.raises(ValueError, match="exceeds the limit"):
        encode(messages.ShutdownMsg("x" * MAX_MESSAGE_BYTES))


def decodes_or_refuses(frames: list[bytes]) -> None:
    try:
        received = decode(frames)
    except ProtocolError:
        return
    assert type(received) in MESSAGES.values()


@examples(300)
@given(
    st.one_of(st.sampled_from(sorted(MESSAGES)).map(str.encode), st.binary(max_size=20)),
    st.binary(max_size=200),
)
def test_random_bytes(name: bytes, data: bytes) -> None:
    decodes_or_refuses([name, data])


@examples(200)
@given(instances(messages.CallMsg) | instances(messages.TaskMsg) | instances(messages.StateMsg), st.data())
def test_damaged_messages(msg: Any, data: st.DataObject) -> None:
    name, whole = encode(msg)
    damaged = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 3))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    decodes_or_refuses([name, bytes(damaged)])


JSON = st.recursive(
    PLAIN, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(PLAIN, inner, max_size=3), max_leaves=8
)


@examples(200)
@given(st.sampled_from(sorted(MESSAGES)), JSON, st.integers(-128, 127))
def test_other_msgpack(name: str, value: Any, code: int) -> None:
    decodes_or_refuses([name.encode(), msgpack.packb(value)])
    if code >= 0:
        decodes_or_refuses([name.encode(), body(task=msgpack.ExtType(code, msgpack.packb(value)))])
