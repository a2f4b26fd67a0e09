"""Message authentication after the ranks have proved their identity."""

import pytest

from ringspark.estimators.collectives.rendezvous.channel import LENGTH_BYTES, ChannelError, Marks

KEY = b"k" * 32


def _opened(marks: Marks, frame: bytes) -> bytes:
    return marks.open(frame[:LENGTH_BYTES], frame[LENGTH_BYTES:])


def test_only_the_next_message_of_the_other_end_is_taken():
    client = Marks(KEY, serves=False)
    first, second = client.seal(b"1"), client.seal(b"2")
    server = Marks(KEY, serves=True)
    assert [_opened(server, frame) for frame in (first, second)] == [b"1", b"2"]
    for heard, wrong in (([], second), ([first], first), ([], Marks(KEY, serves=True).seal(b"1"))):
        server = Marks(KEY, serves=True)
        for frame in heard:
            _opened(server, frame)
        with pytest.raises(ChannelError, match="has a wrong MAC"):
            _opened(server, wrong)
